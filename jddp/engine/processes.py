"""Values exchanged between the processes whose devices make a mesh; every process takes part.

example = from_process_zero(example)             # the same arrays on every process
rows = from_all_processes(num_rows, "evaluate")  # a number of each
"""

import functools

import jax
import numpy as np
from jax import P
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jddp.distributed.coordination import awaiting, collect
from jddp.engine.mesh import axis_of, is_key, over_replicas, platform, sharded
from jddp.ground.typing import Leaf, PyTree
from jddp.reduce.shards import Groups

_DAY_SECONDS = 86_400.0  # A watchdog decides sooner.


@functools.cache
def connect(mesh: Mesh, groups: Groups | None) -> None:
    """Connects the devices of all processes, once for a mesh; every process calls it.

    On CPUs each group of devices connects at its first collective: the group of all replicas, the
    groups of one device of each process, and the groups that divide parameters, if there are some.
    """
    if jax.process_count() == 1 or platform(mesh) != "cpu":
        return
    axis = axis_of(mesh)
    every = [None] if groups is None or groups.num == 1 else [None, groups.members, groups.peers]

    def replica(x: jax.Array) -> list[jax.Array]:
        return [jax.lax.psum(x, axis, axis_index_groups=each) for each in every]

    add = over_replicas(replica, mesh, P(axis), P())
    local = np.ones(len(mesh.local_devices), np.int32)
    ones = jax.make_array_from_process_local_data(sharded(mesh), local)
    with awaiting(range(jax.process_count())):
        from_process_zero(np.int32(0))
        # Second, since it ends only when every device has been through the first.
        jax.block_until_ready(jax.jit(add)(ones))


def from_process_zero(tree: PyTree) -> PyTree:
    """The host arrays of process 0, on every process."""
    if jax.process_count() == 1:
        return tree
    data = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)
    with awaiting(range(jax.process_count())):
        found = multihost_utils.broadcast_one_to_all(data)

    def restore(x: Leaf, own: Leaf) -> Leaf:
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(own)) if is_key(own) else x

    return jax.tree.map(restore, found, tree)


def from_all_processes(number: int, key: str) -> np.ndarray:
    """A number of each process, in their order, on every process; no device takes part.

    Args:
      number: Number of this process.
      key: Name of the exchange. Each process calls as often with the same key as the others.
    """
    found = collect(key, str(number), timeout_seconds=_DAY_SECONDS)
    return np.array([int(x) for x in found])
