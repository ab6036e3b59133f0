"""Devices in one mesh axis, arrays that lie on it, and placement of batches.

`shard_map` is used in this module alone.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jaxtyping import Array

from jddp.engine.state import Inputs, Layout, TrainState
from jddp.ground.errors import ConfigError
from jddp.ground.typing import Batch, PyTree, Tree
from jddp.modules.base import stream
from jddp.modules.rows import check_rows, count_rows

AXIS = "data"
AXIS_HERE: ContextVar[str] = ContextVar("axis", default=AXIS)  # axis of the traced step


def make_mesh(
    devices: Mesh | Sequence[jax.Device] | int | None = None, axis_name: str | None = None
) -> Mesh:
    """Returns a mesh of one axis.

    Args:
      devices: A mesh of one axis, devices, a number n (n / num_processes devices of each process),
        or None: all devices of all processes.
      axis_name: Name of the axis; by default the axis of the given mesh, or else "data".

    Raises:
      ConfigError: If the mesh has several axes, there are not as many devices, or it is no mesh.
    """
    if isinstance(devices, Mesh):
        if len(devices.axis_names) != 1:
            raise ConfigError(
                f"The mesh has axes {devices.axis_names}. Data parallelism needs one: "
                f"jax.make_mesh((n,), ({AXIS!r},), axis_types=(AxisType.Auto,))."
            )
        axis_name = axis_name or axis_of(devices)
        devices = list(devices.devices.flat)
    elif devices is None:
        devices = jax.devices()
    elif isinstance(devices, int) and not isinstance(devices, bool):
        devices = _first_devices(devices)
    elif not (isinstance(devices, Sequence | np.ndarray) and len(devices)) or not all(
        hasattr(x, "device_kind") for x in devices
    ):
        raise ConfigError(
            f"mesh={devices!r} is none. Give a number of devices, devices, a jax.sharding.Mesh of "
            "one axis, or None for all devices."
        )
    # Explicit axes, the default of `jax.make_mesh`, refuse host arrays.
    return Mesh(np.array(devices), (axis_name or AXIS,), axis_types=(AxisType.Auto,))


def axis_of(mesh: Mesh | AbstractMesh) -> str:
    """The name of the axis of a mesh that has one, or of the replicas of a group."""
    return str(mesh.axis_names[-1])


def in_groups(mesh: Mesh, size: int | None) -> Mesh:
    """The same devices, in groups of this size along one more axis; None for one group of all."""
    if size in (None, mesh.size):
        return mesh
    axis = axis_of(mesh)
    names = (f"groups_of_{axis}", axis)
    return Mesh(mesh.devices.reshape(-1, size), names, axis_types=(AxisType.Auto,) * 2)


def in_a_row(mesh: Mesh) -> Mesh:
    """The mesh of one axis, from a mesh of groups; the inverse of `in_groups`."""
    return make_mesh([*mesh.devices.flat], axis_of(mesh)) if _has_groups(mesh) else mesh


def _has_groups(mesh: Mesh | AbstractMesh) -> bool:
    return len(mesh.axis_names) > 1


def sharding_of(layout: Layout, mesh: Mesh) -> NamedSharding:
    """The sharding of a leaf of this layout."""
    return NamedSharding(in_groups(mesh, layout.group_size), layout.spec(axis_of(mesh)))


def shardings(layouts: PyTree, mesh: Mesh) -> PyTree:
    """The shardings of a tree of layouts."""
    return jax.tree.map(lambda layout: sharding_of(layout, mesh), layouts)


def with_shardings(tree: Tree, layouts: PyTree, mesh: Mesh) -> Tree:
    """The same arrays, which lie as these layouts say, by the names of their shardings."""

    # JAX names the results of a program by the mesh of its arguments. A program that makes arrays
    # of groups has no such argument, and its results get a sharding of another class.
    def name(x: jax.Array, layout: Layout) -> jax.Array:
        sharding = sharding_of(layout, mesh)
        if not _has_groups(sharding.mesh) or x.sharding == sharding:
            return x
        parts = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

    return jax.tree.map(name, tree, layouts)


def num_parts(sharding: NamedSharding) -> int:
    """Number of parts of an array; 1 for one that is whole on each device."""
    return int(sharding.mesh.shape[axis_of(sharding.mesh)]) if any(sharding.spec) else 1


@contextlib.contextmanager
def mapped_over(axis: str) -> Iterator[None]:
    """While open, functions are traced as functions of one replica along this axis."""
    token = AXIS_HERE.set(axis)
    try:
        yield
    finally:
        AXIS_HERE.reset(token)


def over_replicas(
    function: Callable[..., Tree], mesh: Mesh | AbstractMesh, in_specs: PyTree, out_specs: PyTree
) -> Callable[..., Tree]:
    """Maps a replica's function over the mesh; it must return equal values for `P()`.

    Args:
      function: Function of one replica.
      mesh: The mesh, of one axis.
      in_specs: Specs, or shardings (`shardings`), of the arguments, a tree or the beginning of one.
      out_specs: Specs, or shardings, of the results.
    """
    # Unchecked: the check refuses plain RNNs, scans from zeros, conds with a constant branch, and
    # under it autodiff sums gradients leaf by leaf, before they could be put into buckets. Tests
    # prove in its place that replicas end with the same state: N devices equal one.
    function = mapped_over(axis_of(mesh))(function)
    ins, outs = (
        jax.tree.map(lambda x: getattr(x, "spec", x), tree) for tree in (in_specs, out_specs)
    )
    mapped = jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    enter, leave = (functools.partial(_relabelled, leaves=x) for x in (False, True))

    @functools.wraps(function)  # its name becomes the name of the compiled program
    def call(*given: PyTree) -> Tree:
        results = mapped(*jax.tree.map(enter, in_specs, given))
        return jax.tree.map(leave, out_specs, results)

    return call


@functools.lru_cache(maxsize=64)
def sender(mesh: Mesh, distance: int, placed: Sequence[NamedSharding]) -> jax.stages.Wrapped:
    """A function that sends what each device holds of arrays to the device that far away."""
    axis, num = axis_of(mesh), mesh.size
    pairs = [(i, (i + distance) % num) for i in range(num)]

    def send(leaves: list[jax.Array]) -> list[jax.Array]:
        return [jax.lax.ppermute(x, axis, pairs) for x in leaves]

    return jax.jit(over_replicas(send, mesh, ([*placed],), [*placed]))


Placed = jax.P | NamedSharding


def _relabelled(placed: Placed, tree: PyTree, *, leaves: bool) -> PyTree:
    """Stacks the groups' copies into one array on entry, and unstacks them on exit.

    Nothing is sent: each device keeps what it has.
    """
    if not isinstance(placed, NamedSharding) or not _has_groups(placed.mesh):
        return tree
    mesh, own = placed.mesh, placed.spec
    every = jax.P(*(name and mesh.axis_names for name in own))
    before, after = (every, own) if leaves else (own, every)
    same = jax.shard_map(lambda x: x, mesh=mesh, in_specs=before, out_specs=after, check_vma=False)
    return same(tree)


def input_specs(mesh: Mesh) -> Inputs:
    """Specs of the inputs of a step: rows split, all others on every device."""
    return Inputs(jax.P(axis_of(mesh)), jax.P(), jax.P())


def _first_devices(num_devices: int) -> list[jax.Device]:
    num_processes = jax.process_count()
    share, rest = divmod(num_devices, num_processes)
    # Takes the same number from each process, whose rows must divide over its own devices: the
    # first n of all devices might all belong to process 0.
    by_process = [jax.local_devices(process_index=i) for i in range(num_processes)]
    most = min(map(len, by_process))
    if share < 1 or rest or share > most:
        raise ConfigError(
            f"mesh of {num_devices} devices: {num_processes} processes with {most} devices each "
            f"can give a multiple of {num_processes} up to {most * num_processes}."
        )
    return [device for own in by_process for device in own[:share]]


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays that are the same on every device."""
    return NamedSharding(mesh, jax.P())


def sharded(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays that are split by rows over the devices."""
    return NamedSharding(mesh, jax.P(axis_of(mesh)))


def platform(mesh: Mesh) -> str:
    """The hardware of the mesh: "cpu", "gpu", ..."""
    return str(mesh.devices.flat[0].platform)


def count_processes(mesh: Mesh) -> int:
    """Number of processes whose devices are in the mesh."""
    return len({device.process_index for device in mesh.devices.flat})


HostOrDevice = jax.Array | np.ndarray
OnMesh = jax.Array | jax.ShapeDtypeStruct  # An array of a mesh, or its shape and sharding there.


def mesh_of(x: OnMesh) -> Mesh:
    """The mesh on which an array lies."""
    assert isinstance(x.sharding, NamedSharding)
    assert isinstance(x.sharding.mesh, Mesh)
    return x.sharding.mesh


def replicate(tree: Tree, mesh: Mesh) -> Tree:
    """Puts a host or device tree, keys included, on every device of the mesh."""
    sharding = replicated(mesh)
    return jax.tree.map(lambda x: put(x, sharding), tree)


def put(x: HostOrDevice, sharding: NamedSharding) -> jax.Array:
    """Puts an array that all processes have on a mesh; each device gets its part alone."""
    if isinstance(x, jax.Array) and x.sharding == sharding:
        return x
    if is_key(x):
        # A typed key cannot be put on devices of other processes; its data can.
        data = put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    # Copies to the host first: from there an array can be placed on a mesh of several processes.
    return jax.device_put(np.array(_fetch(x)), sharding)


def _fetch(x: HostOrDevice) -> HostOrDevice:
    """A whole array; for a replicated array this process's view, without a collective."""
    if not isinstance(x, jax.Array):
        return x
    if x.is_fully_replicated:
        return x.addressable_data(0)
    if x.is_fully_addressable:
        return x
    # The array is divided over devices of other processes: gathers this array alone.
    assert isinstance(x.sharding, NamedSharding)
    gather = jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, jax.P()))
    return gather(x).addressable_data(0)


def copy_off_mesh(x: jax.Array) -> jax.Array:
    """A copy of a replicated array, bound to no device."""
    return jnp.copy(_fetch(x)) if is_key(x) else jnp.array(np.asarray(_fetch(x)))


def is_key(x: object) -> bool:
    """Whether it is a typed key of random numbers, or an array of them."""
    return jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)


def _kept(x: HostOrDevice) -> HostOrDevice:
    """A copy of a host array that could still be written: on CPUs JAX takes its memory as it is."""
    return x.copy() if isinstance(x, np.ndarray) and x.flags.writeable else x


def put_rows(batch: Tree, mesh: Mesh) -> Tree:
    """Puts this process's rows on its devices; rows of all processes make the global batch."""
    sharding = sharded(mesh)
    if all(getattr(x, "sharding", None) == sharding for x in jax.tree.leaves(batch)):
        return batch  # An earlier call placed it; `device_put` takes longer to find out.
    if platform(mesh) == "cpu":
        batch = jax.tree.map(_kept, batch)
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)

    def put(leaf: HostOrDevice) -> jax.Array:
        # Already a global array, and this process holds a part of it: it must not be joined again.
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        if is_key(leaf):
            data = put(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))

    return jax.tree.map(put, batch)


@dataclasses.dataclass(frozen=True)
class RowSplit:
    """The numbers by which a step divides rows: over processes, replicas and micro-batches.

    Attributes:
      num_replicas: Replicas of all processes together: one a device, or logical ones.
      num_local_replicas: Replicas of this process.
      accumulate_steps: Micro-batches of a replica.
      noun: Word for the replicas, for messages.
    """

    num_replicas: int
    num_local_replicas: int
    accumulate_steps: int
    noun: str

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step, of all replicas: a divisor of the global batch size."""
        return self.num_replicas * self.accumulate_steps

    @property
    def num_local_micro_batches(self) -> int:
        """Micro-batches of a step, of the replicas of this process."""
        return self.num_local_replicas * self.accumulate_steps

    def count_micro_batches(self, batch: Batch) -> int:
        """Micro-batches of all replicas that have rows of this batch."""
        # An array with rows on other processes, or its shape, is the global batch; any other holds
        # this process's rows.
        places = [getattr(x, "sharding", None) for x in jax.tree.leaves(batch)]
        on_all = all(place is not None and not place.is_fully_addressable for place in places)
        return self.num_micro_batches if on_all else self.num_local_micro_batches

    def check(self, batch: Batch) -> None:
        """Refuses rows that are not a multiple of the micro-batches.

        Raises:
          ConfigError: If they are not, with the sizes that would be.
        """
        num_parts = self.count_micro_batches(batch)
        what = f"{num_parts // self.accumulate_steps} {self.noun}"
        if self.accumulate_steps > 1:
            what += f" times accumulate_steps={self.accumulate_steps}"
        check_rows(count_rows(batch), num_parts, what)

    def of_micro_batch(self, batch: Batch) -> int:
        """Rows of a micro-batch; at least one."""
        # A batch that is empty, or has fewer rows than micro-batches, is planned for as one row.
        return max(1, count_rows(batch) // self.count_micro_batches(batch))


def all_gather(tree: PyTree, axis: str | None = None) -> PyTree:
    """The rows of all replicas, in their order, inside a loss.

    For losses that couple examples, such as contrastive ones. A mean over rows needs no gathering:
    see `jddp.Mean`, and `jax.lax.pmean` for a mean that is multiplied with another. Gradients flow
    back to the replica that a row came from, so they equal the gradients of one device with the
    whole batch. With `accumulate_steps` the rows of one micro-batch are gathered; in evaluation,
    rows of padding are among them.

    Args:
      tree: Arrays of shape (b, ...), the rows of each replica.
      axis: Name of the mapped axis, in a step of your own; by default the axis of the step that
        calls the loss.

    Returns:
      Arrays of shape (replicas * b, ...).
    """
    # Its transpose is a reduce-scatter: the gradient of a row, which all replicas use, is summed
    # where the row came from.
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axis or AXIS_HERE.get(), tiled=True), tree)


def replica_key(state: TrainState, name: str = "replica") -> Array:
    """One PRNG key per replica, for the next step of the state.

    All random numbers of a step follow this rule: the base key, folded with the step, with the
    replica's number and with the CRC-32 of a name. So a resumed run repeats the same numbers,
    and no model shares them, unless it has a stream of that name; the `key` of a loss is the
    stream "loss".

    Args:
      state: State from `init` or `step`.
      name: Name of the stream of random numbers.

    Returns:
      Keys of shape (replicas,), one on each device.
    """
    return _replica_keys(state.key, state.step, sharded(mesh_of(state.step)), name)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _replica_keys(key: Array, step: Array, rows: NamedSharding, name: str) -> Array:
    # Folded, and not split and carried: the key of any step follows from the base key, so that a
    # resumed run needs no other state, whatever happened between.
    key = jax.random.fold_in(key, step)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(rows.mesh.size))
    return jax.lax.with_sharding_constraint(jax.vmap(lambda key: stream(key, name))(keys), rows)
