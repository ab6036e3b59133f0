"""A state that was saved by one number of replicas, and goes on on another.

What is replicated or split does not care. What each replica has of its own is a row for each of
them, and on another number of replicas begins with what its kind says.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jddp.mesh import replicated
from jddp.state import Kind


def saved_shapes(
    wanted: Mapping[str, Any], kinds: Mapping[str, Kind], saved: Mapping[str, tuple[int, ...]]
) -> dict[str, jax.ShapeDtypeStruct]:
    """What to read: shapes and shardings as wanted, with as many rows as there are replicas' own.

    Args:
      wanted: Arrays, or their shapes and shardings, by path.
      kinds: Of each.
      saved: Shapes in the checkpoint.
    """

    def shape(name: str, x: Any) -> jax.ShapeDtypeStruct:
        there = saved.get(name, x.shape)
        if kinds[name].is_per_replica and there != x.shape and there[1:] == x.shape[1:]:
            return jax.ShapeDtypeStruct(there, x.dtype, sharding=replicated(x.sharding.mesh))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    return {name: shape(name, x) for name, x in wanted.items()}


def on_this_mesh(x: jax.Array, want: jax.Array, kind: Kind) -> jax.Array:
    """Gives each replica a row, of an array that was saved by another number of replicas."""
    if x.shape == want.shape:
        return x
    if kind is Kind.ANEW:
        return want
    row = x.sum(0) / want.shape[0] if kind is Kind.SUMMED else x.mean(0)
    return jax.device_put(jnp.broadcast_to(row.astype(x.dtype), want.shape), want.sharding)
