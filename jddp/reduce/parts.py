"""Arrays cut into a part for each replica.

An array is flattened, filled up with zeros and cut into rows of equal length, one for each replica.
A part keeps the number of dims of its array, so that what looks at them finds as many.

    kernel (3, 3, 10) on 4 replicas  ─►  4 rows of 23, the last with 2 zeros  ─►  parts (23, 1, 1)
"""

import math

import jax
import jax.numpy as jnp
from jax import lax


def cut(x: jax.Array, num_parts: int) -> jax.Array:
    """Cuts an array into rows, (num_parts, part)."""
    size = math.prod(part_shape(x.shape, num_parts))
    flat = jnp.pad(x.ravel(), (0, num_parts * size - x.size))
    return flat.reshape(num_parts, size)


def join(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Makes an array of its rows; the inverse of `cut`."""
    return rows.ravel()[: math.prod(shape)].reshape(shape)


def own_part(x: jax.Array, axis: str) -> jax.Array:
    """This replica's part of an array that all replicas have."""
    num_parts = lax.axis_size(axis)
    row = lax.dynamic_index_in_dim(cut(x, num_parts), lax.axis_index(axis), keepdims=False)
    return row.reshape(part_shape(x.shape, num_parts))


def parts_shape(shape: tuple[int, ...], num_parts: int) -> tuple[int, ...]:
    """The shape of all parts, one behind the other."""
    size, *ones = part_shape(shape, num_parts)
    return (num_parts * size, *ones)


def part_shape(shape: tuple[int, ...], num_parts: int) -> tuple[int, ...]:
    """The shape of a part: its elements first, then ones; at least one dim."""
    return (-(-math.prod(shape) // num_parts), *[1] * (len(shape) - 1))
