"""The state of training, as one pytree, and how each leaf of it lies on the devices.

    replicated    the same on every replica
    per replica   a leading dim of N, one row for each replica
    sharded       flat, a shard on each replica
    divided       of its own shape, split along one of its dims

The module that makes a leaf decides its `Layout`, once: a tree of layouts gives the step its specs,
and is written into checkpoints, whose readers use it. JAX does not check that arrays which leave a
`shard_map` as replicated are equal: a value that differs per replica would leave without an error,
and every reader would see replica 0's.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, NamedTuple

import jax

from jddp.ground.typing import (
    Batch,
    HookState,
    ModelState,
    OptState,
    Params,
    Path,
    PyTree,
    Shaped,
    Shown,
    Tree,
    in_mebibytes,
)
from jddp.reduce.shards import Shape

KeepsOwn = Callable[[Path, Shaped], bool]  # whether each replica has its own of a leaf
Values = tuple[Params, ModelState]  # the arrays that a model computes with
# The fields of a state that hold trees of arrays.
ARRAYS = ("params", "ema_params", "model_state", "ema_state", "opt_state", "comm_state")


class Layout:
    """Placement of a leaf on the devices; here it is split by its first dim."""

    is_per_replica = False

    @property
    def group_size(self) -> int | None:
        """Number of replicas that have the whole leaf together; None for all."""
        return None

    def spec(self, axis: str) -> jax.P:
        """The partition spec of such a leaf."""
        return jax.P(axis)

    def one_device_shape(self, shape: Shape) -> Shape:
        """The shape that a leaf of `shape` on the mesh has on a single device."""
        return shape


@dataclasses.dataclass(frozen=True)
class Replicated(Layout):
    """The same on every replica."""

    def spec(self, axis: str) -> jax.P:
        """The partition spec of such a leaf."""
        return jax.P()


@dataclasses.dataclass(frozen=True)
class PerReplica(Layout):
    """A row for each replica.

    Attributes:
      on_resize: Rows on another number of replicas: the "mean" of all, a share of their "sum",
        or "reset", which is as in a first state.
    """

    on_resize: str = "mean"
    is_per_replica = True

    def one_device_shape(self, shape: Shape) -> Shape:
        """The shape of one row."""
        return shape[1:]


@dataclasses.dataclass(frozen=True)
class Sharded(Layout):
    """Flat and in shards, as `jddp.reduce.shards.own_shard` cuts it.

    Attributes:
      whole: Shape that the leaf would have on a single device.
    """

    whole: Shape

    def one_device_shape(self, shape: Shape) -> Shape:
        """The shape before it was cut."""
        return self.whole


@dataclasses.dataclass(frozen=True)
class Divided(Layout):
    """Of its own shape, and split along one of its dims.

    Attributes:
      dim: The dim.
      num: Number of replicas of a group, which divides its size.
    """

    dim: int
    num: int

    @property
    def group_size(self) -> int:
        """Number of replicas of a group."""
        return self.num

    def spec(self, axis: str) -> jax.P:
        """The partition spec of such a leaf."""
        return jax.P(*[None] * self.dim, axis)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CommState:
    """State of the reduction, kept from step to step; () for nothing.

    Attributes:
      hook: State of the `CommHook`.
      loss_scale: A `LossScale`, where it is dynamic.
      outer: Under `LocalSteps`, the parameters after the last outer step, and the outer
        optimizer's state.
    """

    hook: HookState = ()
    loss_scale: PyTree = ()
    outer: PyTree = ()


@jax.tree_util.register_dataclass
# Compared by identity: arrays have no truth value.
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TrainState(Shown):
    """Everything that a step reads and writes.

    Attributes:
      step: Finished optimizer steps; an int32 scalar.
      params: Nested dict of parameters.
      ema_params: Their exponential moving average, in float32 at least, or None.
      model_state: Nested dict of everything else that the model keeps, such as batch statistics.
      opt_state: State of the optimizer.
      comm_state: State of the gradient reduction, a `CommState`.
      skipped: Number of steps that changed nothing, since numbers were not finite; int32.
      key: Base key of all random numbers.
      ema_state: Moving average of the floating values of `model_state`; None without `ema_params`.
    """

    # JAX also fills these fields with shapes, layouts and shardings.
    step: Any
    params: Params
    ema_params: Params
    model_state: ModelState
    opt_state: OptState
    comm_state: CommState
    skipped: Any
    key: Any
    ema_state: ModelState | None = None
    _taken_by: ClassVar[int | None] = None

    def __repr__(self) -> str:
        """Its contents, in numbers and bytes; waits for the devices."""
        # Printing a state after a step has taken it must not raise: a debugger prints it.
        if getattr(self.step, "is_deleted", lambda: False)():
            return "TrainState (donated to a step; use ddp.latest)"
        is_there = isinstance(self.step, jax.Array) and not isinstance(self.step, jax.core.Tracer)
        lines = [f"TrainState at step {self.step}" if is_there else "TrainState, its shapes"]
        for field in ARRAYS:
            if leaves := jax.tree.leaves(getattr(self, field)):
                numbers = f"{sum(x.size for x in leaves):,} numbers in {len(leaves)} arrays"
                size = in_mebibytes(sum(x.size * x.dtype.itemsize for x in leaves))
                lines.append(f"  {field:<12} {numbers}, {size} MiB")
        return "\n".join(lines)

    def replace(self, **changes: PyTree) -> "TrainState":
        """Returns a copy with some fields changed.

        Without `opt_state=()`, schedule-free optimizers evaluate their average of `params`.
        """
        fields: dict[str, Any] = changes
        return dataclasses.replace(self, **fields)


class Inputs(NamedTuple):
    """Inputs of a step other than the state.

    Attributes:
      rows: The batch, split over the replicas.
      constants: Constants of the loss, whole on every replica; None for none.
      loss_limit: Loss above which the step changes nothing, a float32 scalar; None for no limit.
    """

    rows: Batch
    constants: PyTree = None
    loss_limit: Any = None


def enter(state: Tree, layouts: PyTree) -> Tree:
    """Squeezes the leading dim of 1 that a replica sees on its per-replica leaves."""
    return jax.tree.map(lambda x, layout: x[0] if layout.is_per_replica else x, state, layouts)


def leave(state: Tree, layouts: PyTree) -> Tree:
    """Adds the leading dim again; the inverse of `enter`."""
    return jax.tree.map(lambda x, layout: x[None] if layout.is_per_replica else x, state, layouts)


def own_layouts(tree: PyTree, keeps_own: KeepsOwn) -> PyTree:
    """Layouts of a tree in which each replica keeps its own of some leaves."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: PerReplica() if keeps_own(path, x) else Replicated(), tree
    )


def key_of_replica(state: TrainState, replica: jax.Array) -> jax.Array:
    """The key of a replica in the step that starts from a state."""
    # The key depends on the base key, the step and the replica; micro-batch and stream are folded
    # in later. So random numbers differ in all four, and a resumed run repeats them from the one
    # saved key.
    return jax.random.fold_in(jax.random.fold_in(state.key, state.step), replica)


def name_of(path: Path) -> str:
    """The name of a leaf: the entries of its path."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as "params/Dense_0/kernel", in the tree's order."""
    return {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def is_float(x: Shaped) -> bool:
    """Whether a leaf is of floating values: whole numbers count steps, and keys are shared."""
    return jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)


def form_key(tree: PyTree) -> Hashable:
    """The form that a jitted function is compiled for: structure, shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((x.shape, x.dtype) for x in leaves)


def shapes_of(tree: Tree) -> Tree:
    """Shapes and dtypes, as JAX would take them."""
    return jax.eval_shape(lambda x: x, tree)


def stack_rows(tree: Tree, layouts: PyTree, rows: jax.sharding.NamedSharding, num: int) -> Tree:
    """Gives each of `num` replicas its row of every per-replica leaf; the tree may be donated."""
    if not any(layout.is_per_replica for layout in jax.tree.leaves(layouts)):
        return tree

    def stack(x: jax.Array, layout: Layout) -> jax.Array:
        if not layout.is_per_replica:
            return x
        return jax.lax.with_sharding_constraint(jax.numpy.broadcast_to(x, (num, *x.shape)), rows)

    # Jitted, so that each device makes its row alone, and none holds all rows. The rows take the
    # memory of the tree, or both would be there; rows of several logical replicas do not fit into
    # it.
    donated = 0 if num == rows.mesh.size else ()
    return jax.jit(lambda tree: jax.tree.map(stack, tree, layouts), donate_argnums=donated)(tree)


def merge_rows(tree: Tree, layouts: PyTree, everywhere: jax.sharding.NamedSharding) -> Tree:
    """Averages the rows of every per-replica leaf; the rest is left as it is."""
    leaves, treedef = jax.tree.flatten(tree)
    kinds = tuple(jax.tree.leaves(layouts))
    if not any(layout.is_per_replica for layout in kinds):
        return tree
    return jax.tree.unflatten(treedef, _merge(leaves, kinds, everywhere))


# One function serves all calls: `jax.jit` of a new one would compile for each evaluation.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _merge(
    leaves: list[jax.Array], kinds: tuple[Layout, ...], everywhere: jax.sharding.NamedSharding
) -> list[jax.Array]:
    # Every device gets all rows before their mean is taken: so the mean is the same on any number
    # of devices.
    return [*map(merged, jax.lax.with_sharding_constraint(leaves, everywhere), kinds)]


def merged(x: jax.Array, layout: Layout) -> jax.Array:
    """The mean of the rows of a per-replica leaf, in its dtype; any other leaf as it is."""
    if not layout.is_per_replica or is_float(x):
        return widened(x).mean(0).astype(x.dtype) if layout.is_per_replica else x
    # Quotients and remainders apart: the sum of all rows may be larger than the dtype holds.
    whole, rest = x // len(x), x % len(x)
    return whole.sum(0, dtype=x.dtype) + (rest.sum(0) // len(x)).astype(x.dtype)


def widened(tree: Tree) -> Tree:
    """Floating values in float32 at least: sums in half precision lose their last digits."""
    return jax.tree.map(lambda x: x.astype(jax.numpy.promote_types(x.dtype, "float32")), tree)
