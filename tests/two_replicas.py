"""Two replicas under a bare `jax.shard_map`, for tests of a part of the step by itself."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

from jddp.reduce.hooks import choose_packing
from jddp.reduce.reducer import Reducer
from jddp.workbench.logical_replicas import pack_rows

AXIS = "data"


def on_two(function, *rows):
    """Calls a function on each of two replicas with its row of each array.

    Returns the results of both, on the host: each array has a row for each replica.
    """

    def replica(*rows):
        own = jax.tree.map(lambda x: x[0], rows)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], function(*own))

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), (AXIS,))
    mapped = jax.shard_map(replica, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    return jax.device_get(jax.jit(mapped)(*jax.tree.map(jnp.asarray, rows)))


def reduction_of(layout="leaf", *, wire_dtype=None, hook=None, is_sharded=False, num=None):
    """A reduction of buckets of at most 64 bytes."""
    packed = choose_packing(layout, hook, "cpu", on_network=True, is_sharded=is_sharded)
    if num is not None:
        packed = pack_rows(layout, num)
    return Reducer(AXIS, (64,), *packed, wire_dtype and jnp.dtype(wire_dtype))
