"""Calls that trace or run the user's model, or wait for other processes.

The errors of a model get a way out, and a watchdog sees what is awaited.

    run_compiled(function, *args)
    example = from_process(0, example)             # the same arrays on every process
    rows = from_all_processes(num_rows, "evaluate")  # a number of each
"""

import contextlib
import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jddp.distributed.coordination import awaiting, collect, computing, keep_own_programs
from jddp.engine.mesh import HostOrDevice, axis_of, is_key, over_replicas, platform, sharded
from jddp.ground.errors import ConfigError
from jddp.ground.typing import PyTree, Tree
from jddp.reduce.shards import Groups

Result = TypeVar("Result")
_CHECKS = {"jax_debug_nans": jax.debug_nans, "jax_debug_infs": jax.debug_infs}


def run_compiled(function: Callable[..., Result], *args: PyTree) -> Result:
    """Calls a compiled function, for which the devices of other processes may be awaited."""
    with computing(args):
        return call(function, *args)


def checks_for_nan() -> list[Callable[[bool], contextlib.AbstractContextManager[None]]]:
    """The checks of JAX for NaN and infinity that are on: `jax.debug_nans`, `jax.debug_infs`."""
    return [check for name, check in _CHECKS.items() if getattr(jax.config, name)]


def call(function: Callable[..., Result], *args: PyTree) -> Result:
    """Calls a function that traces the user's model.

    Raises:
      ConfigError: If the model names an axis that does not exist.
    """
    # JAX leaves the check off in a thread that was in a context with it off. Some functions of JAX
    # use such a context, also the functions that look for the operation that made the first NaN.
    checks = checks_for_nan()
    try:
        with checks[0](True) if checks else contextlib.nullcontext():
            return function(*args)
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        name = str(error).split("unbound axis name:")[-1].strip().split(" ")[0].rstrip(".")
        raise ConfigError(
            f"The model or loss uses axis {name!r}, which is not the axis of the replicas. Name "
            f"that so: mesh=jax.make_mesh((n,), ({name!r},)), mesh.axis_name={name} in a config."
        ) from error


_DAY_SECONDS = 86_400.0  # A watchdog decides sooner.


@functools.cache
def connect(mesh: jax.sharding.Mesh, groups: Groups | None) -> None:
    """Connects the devices of all processes, once for a mesh; every process calls it.

    On CPUs each group of devices connects at its first collective: the group of all replicas, the
    groups of one device of each process, and the groups that divide parameters, if there are some.
    """
    if jax.process_count() == 1 or platform(mesh) != "cpu":
        return
    keep_own_programs()
    axis = axis_of(mesh)
    every = [None] if groups is None or groups.num == 1 else [None, groups.members, groups.peers]

    def replica(x: jax.Array) -> list[jax.Array]:
        return [jax.lax.psum(x, axis, axis_index_groups=each) for each in every]

    add = over_replicas(replica, mesh, jax.P(axis), jax.P())
    local = np.ones(len(mesh.local_devices), np.int32)
    ones = jax.make_array_from_process_local_data(sharded(mesh), local)
    with awaiting(range(jax.process_count())):
        from_process(0, np.int32(0))
        # Runs second, since it ends only when every device has finished the first one.
        jax.block_until_ready(jax.jit(add)(ones))


def from_process(source: int, tree: Tree) -> Tree:
    """The host arrays of one process, on every process."""
    if jax.process_count() == 1:
        return tree
    data = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)
    with awaiting(range(jax.process_count())):
        found = multihost_utils.broadcast_one_to_all(data, jax.process_index() == source)

    def restore(x: HostOrDevice, own: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
        if not is_key(own):
            return x
        return jax.random.wrap_key_data(jax.numpy.asarray(x), impl=jax.random.key_impl(own))

    return jax.tree.map(restore, found, tree)


def from_all_processes(number: int, key: str) -> np.ndarray:
    """A number of each process, in their order, on every process; no device takes part.

    Args:
      number: Number of this process.
      key: Name of the exchange. Each process calls as often with the same key as the others.
    """
    found = collect(key, str(number), timeout_seconds=_DAY_SECONDS)
    return np.array([int(x) for x in found])
