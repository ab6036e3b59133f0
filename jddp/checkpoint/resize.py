"""A state that was saved by one number of replicas, and goes on on another.

What is replicated or split by rows does not care. What each replica has of its own is a row for
each of them, and on another number of replicas begins with what its kind says. An optimizer's state
may be whole or cut into parts, and what was saved as one goes on as the other.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jddp.mesh import replicated, sharded
from jddp.reduce import parts_shape
from jddp.state import Kind, Sharded

Shape = tuple[int, ...]


def saved_shapes(
    wanted: Mapping[str, Any],
    kinds: Mapping[str, Kind | Sharded],
    saved: Mapping[str, Shape],
    num_replicas: int | None,
) -> dict[str, jax.ShapeDtypeStruct]:
    """What to read: shapes and shardings as wanted, but where the checkpoint has another form.

    Args:
      wanted: Arrays, or their shapes and shardings, by path.
      kinds: Of each.
      saved: Shapes in the checkpoint.
      num_replicas: That saved it; None if it does not say.
    """

    def shape(name: str, x: Any) -> jax.ShapeDtypeStruct:
        there, sharding, mesh = saved.get(name, x.shape), x.sharding, x.sharding.mesh
        if there == x.shape:
            pass
        elif kinds[name].is_per_replica and there[1:] == x.shape[1:]:
            sharding = replicated(mesh)
        elif name.startswith("opt_state/") and there in _forms(kinds[name], x, num_replicas):
            sharding = sharded(mesh) if there[0] % mesh.size == 0 else replicated(mesh)
        else:
            there = x.shape
        return jax.ShapeDtypeStruct(there, x.dtype, sharding=sharding)

    return {name: shape(name, x) for name, x in wanted.items()}


def _forms(kind: Kind | Sharded, x: Any, num_replicas: int | None) -> list[Shape]:
    """The shapes of an array whole, and cut into parts by those who saved it."""
    whole = kind.whole if isinstance(kind, Sharded) else x.shape
    return [whole, *([] if num_replicas is None else [parts_shape(whole, num_replicas)])]


def on_this_mesh(x: jax.Array, want: jax.Array, kind: Kind | Sharded) -> jax.Array:
    """Gives an array the form that is wanted here."""
    if x.shape == want.shape:
        return x
    if kind is Kind.ANEW:
        return want
    if not kind.is_per_replica:
        size = math.prod(kind.whole if isinstance(kind, Sharded) else want.shape)
        return _cut_again(size, want.shape, want.sharding)(x)
    row = x.sum(0) / want.shape[0] if kind is Kind.SUMMED else x.mean(0)
    return jax.device_put(jnp.broadcast_to(row.astype(x.dtype), want.shape), want.sharding)


@functools.lru_cache(maxsize=64)
def _cut_again(size: int, shape: Shape, sharding: NamedSharding) -> Any:
    """From an array of `size` elements, whole or in parts, to one whose rest is zero."""

    def again(x: jax.Array) -> jax.Array:
        flat = x.ravel()[:size]
        return jnp.pad(flat, (0, math.prod(shape) - size)).reshape(shape)

    return jax.jit(again, out_shardings=sharding)
