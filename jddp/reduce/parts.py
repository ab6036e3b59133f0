"""Arrays cut into one part, a shard, for each replica.

An array is flattened, filled up with zeros and cut into rows of equal length, one for each replica.
A part keeps the number of dims of its array, so that an optax mask by that number still works.

    kernel (3, 3, 10) on 4 replicas  ─►  4 rows of 23, the last with 2 zeros  ─►  parts (23, 1, 1)
"""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

Shape = tuple[int, ...]


def cut(x: jax.Array, num_parts: int) -> jax.Array:
    """Cuts an array into rows, (num_parts, part)."""
    size = math.prod(part_shape(x.shape, num_parts))
    # Collectives need rows of equal length on all replicas. Each array is cut by itself, so that
    # every replica has a share of each, and its update takes as long as that of the others.
    flat = jnp.pad(x.ravel(), (0, num_parts * size - x.size))
    return flat.reshape(num_parts, size)


def pack(arrays: Sequence[jax.Array], num_parts: int) -> jax.Array:
    """Cuts arrays of one dtype, side by side: (num_parts, all their parts)."""
    return jnp.concatenate([cut(x, num_parts) for x in arrays], axis=1)


def unpack(rows: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
    """Puts arrays together from their rows; the inverse of `pack`."""
    sizes = [part_shape(shape, len(rows))[0] for shape in shapes]
    pieces = jnp.split(rows, [*itertools.accumulate(sizes)][:-1], axis=1)
    return [
        piece.ravel()[: math.prod(shape)].reshape(shape)
        for piece, shape in zip(pieces, shapes, strict=True)
    ]


def own_part(x: jax.Array, axis: str) -> jax.Array:
    """This replica's part of an array that all replicas have."""
    num_parts = lax.axis_size(axis)
    row = lax.dynamic_index_in_dim(cut(x, num_parts), lax.axis_index(axis), keepdims=False)
    return row.reshape(part_shape(x.shape, num_parts))


def parts_shape(shape: Shape, num_parts: int) -> Shape:
    """The shape of all parts, one behind the other."""
    size, *ones = part_shape(shape, num_parts)
    return (num_parts * size, *ones)


def part_shape(shape: Shape, num_parts: int) -> Shape:
    """The shape of a part: its elements first, then ones; at least one dim."""
    return (-(-math.prod(shape) // num_parts), *[1] * (len(shape) - 1))
