"""Fits a state that was saved by one number of replicas to another.

Replicated arrays stay as they are. Per-replica arrays have a row for each replica; on another
number of replicas they start with the mean, a part of the sum, or a reset, as their layout states.
An optimizer's state may be whole or sharded, and is converted.
"""

import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.stages import Wrapped

from jddp.engine.mesh import in_a_row, replicated, sharded
from jddp.engine.state import Layout, PerReplica, merged
from jddp.reduce.shards import Shape
from jddp.typing import Leaf


def to_read(shape: Sequence[int], layout: Layout, want: Leaf) -> jax.ShapeDtypeStruct:
    """Shape and sharding for reading an array, which may have been saved on another mesh."""
    mesh = in_a_row(want.sharding.mesh)
    sharding = want.sharding
    if tuple(shape) != want.shape:
        fits = not layout.is_per_replica and shape and shape[0] % mesh.size == 0
        sharding = sharded(mesh) if fits else replicated(mesh)
    return jax.ShapeDtypeStruct(shape, want.dtype, sharding=sharding)


def empty(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays without elements, which no file has: orbax refuses them."""
    return {n: jnp.zeros_like(x, device=x.sharding) for n, x in shapes.items() if not x.size}


def on_this_mesh(x: jax.Array, want: jax.Array, layout: Layout) -> jax.Array:
    """Converts an array that was saved in a layout to the shape and sharding wanted here."""
    if x.shape == want.shape or layout == PerReplica("reset"):
        return x if x.shape == want.shape else want
    if not layout.is_per_replica:
        size = math.prod(layout.one_device_shape(x.shape))
        return _cut_again(size, want.shape, want.sharding)(x)
    is_sum = layout == PerReplica("sum")
    row = (x.sum(0) / want.shape[0]).astype(x.dtype) if is_sum else merged(x, layout)
    return jax.device_put(jnp.broadcast_to(row, want.shape), want.sharding)


@functools.lru_cache(maxsize=64)
def _cut_again(size: int, shape: Shape, sharding: NamedSharding) -> Wrapped:
    """Converts an array of `size` elements, whole or sharded, to a shape padded with zeros."""

    def again(x: jax.Array) -> jax.Array:
        flat = x.ravel()[:size]
        return jnp.pad(flat, (0, math.prod(shape) - size)).reshape(shape)

    return jax.jit(again, out_shardings=sharding)
