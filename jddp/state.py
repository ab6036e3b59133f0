"""The state of training, as one pytree, and how each leaf of it lies on the devices.

    replicated    the same on every replica
    per replica   a leading dim of N, one row for each replica
    sharded       flat, a part on each replica

Whoever makes a leaf declares its kind; a tree of kinds gives the step its specs. JAX does not
check that what leaves a `shard_map` as replicated is: a value that differs per replica would leave
without an error, and every reader would see replica 0's.
"""

import dataclasses
import enum
from collections.abc import Callable
from html import escape
from typing import Any

import jax
from jax import P
from jax.sharding import NamedSharding

from jddp.reduce import in_mebibytes

PyTree = Any


class Kind(enum.Enum):
    """How a whole leaf lies on the devices; and what another number of replicas begin with."""

    REPLICATED = "replicated"
    AVERAGED = "per replica, and each begins with the mean of all"
    SUMMED = "per replica, and each begins with its share of the sum of all"
    ANEW = "per replica, and each begins as at first"

    @property
    def is_per_replica(self) -> bool:
        """Whether each replica has a row of its own."""
        return self in (Kind.AVERAGED, Kind.SUMMED, Kind.ANEW)

    def spec(self, axis: str) -> P:
        """The partition spec of such a leaf."""
        return P() if self is Kind.REPLICATED else P(axis)


@dataclasses.dataclass(frozen=True)
class Sharded:
    """The kind of a leaf that is cut into parts, as `jddp.reduce.own_part` does.

    Attributes:
      whole: The shape that it would have on a single device.
    """

    whole: tuple[int, ...]
    is_per_replica = False

    def spec(self, axis: str) -> P:
        """The partition spec of such a leaf."""
        return P(axis)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CommState:
    """What the reduction remembers from step to step; () for nothing.

    Attributes:
      hook: The `CommHook`'s.
      loss_scale: A `LossScale`, where it is dynamic.
      outer: Under `local_steps`, the parameters after the last meeting, and the outer optimizer's
        state.
    """

    hook: PyTree = ()
    loss_scale: PyTree = ()
    outer: PyTree = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TrainState:
    """Everything that a step reads and writes.

    Attributes:
      step: Finished optimizer steps; an int32 scalar.
      params: Nested dict of parameters.
      ema_params: Their exponential moving average, or None.
      model_state: Nested dict of everything else that the model keeps, such as batch statistics.
      opt_state: The optimizer's.
      comm_state: The gradient reduction's, a `CommState`.
      skipped: Those of the steps that changed nothing, since numbers were not finite; int32.
      key: Base key of all random numbers.
    """

    step: Any
    params: PyTree
    ema_params: PyTree
    model_state: PyTree
    opt_state: PyTree
    comm_state: CommState
    skipped: Any
    key: Any

    def __repr__(self) -> str:
        """What it holds, in numbers and bytes; waits for the devices."""
        if getattr(self.step, "is_deleted", lambda: False)():
            return "TrainState, whose memory a step has taken"
        is_there = isinstance(self.step, jax.Array) and not isinstance(self.step, jax.core.Tracer)
        lines = [f"TrainState at step {self.step}" if is_there else "TrainState, its shapes"]
        for field in ("params", "ema_params", "model_state", "opt_state", "comm_state"):
            leaves = jax.tree.leaves(getattr(self, field))
            size = in_mebibytes(sum(x.size * x.dtype.itemsize for x in leaves))
            numbers = f"{sum(x.size for x in leaves):,} numbers in {len(leaves)} arrays"
            lines += [f"  {field:<12} {numbers}, {size} MiB"] * bool(leaves)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"

    def replace(self, **changes: Any) -> "TrainState":
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def specs(kinds: PyTree, axis: str) -> PyTree:
    """Partition specs, from a tree of kinds."""
    return jax.tree.map(lambda kind: kind.spec(axis), kinds)


def enter(state: PyTree, kinds: PyTree) -> PyTree:
    """Takes off the leading dim of 1 that a replica sees on its per-replica leaves."""
    return jax.tree.map(lambda x, kind: x[0] if kind.is_per_replica else x, state, kinds)


def leave(state: PyTree, kinds: PyTree) -> PyTree:
    """Puts the leading dim back; the inverse of `enter`."""
    return jax.tree.map(lambda x, kind: x[None] if kind.is_per_replica else x, state, kinds)


def float_kinds(tree: PyTree, is_own: Callable[[Any], bool]) -> PyTree:
    """Kinds of a tree in which each replica keeps its own of some floating leaves, by their path.

    Whole numbers and keys are the same everywhere: they count steps, which replicas take together.
    """

    def kind(path: Any, x: Any) -> Kind:
        own = jax.numpy.issubdtype(x.dtype, jax.numpy.inexact) and is_own(path)
        return Kind.AVERAGED if own else Kind.REPLICATED

    return jax.tree_util.tree_map_with_path(kind, tree)


def stack_rows(tree: PyTree, kinds: PyTree, rows: NamedSharding, num: int) -> PyTree:
    """Gives each of `num` replicas its row of every per-replica leaf of a replicated tree."""
    if not any(kind.is_per_replica for kind in jax.tree.leaves(kinds)):
        return tree

    def stack(x: jax.Array, kind: Kind | Sharded) -> jax.Array:
        if not kind.is_per_replica:
            return x
        x = jax.numpy.broadcast_to(x, (num, *x.shape))
        return jax.lax.with_sharding_constraint(x, rows)

    return jax.jit(lambda tree: jax.tree.map(stack, tree, kinds))(tree)


def merge_rows(tree: PyTree, kinds: PyTree, everywhere: NamedSharding) -> PyTree:
    """Averages the rows of every per-replica leaf; the rest is left as it is."""
    if not any(kind.is_per_replica for kind in jax.tree.leaves(kinds)):
        return tree

    def merge(x: jax.Array, kind: Kind) -> jax.Array:
        # All rows on every device, and then their mean: so it is the same on any number of them.
        rows = jax.lax.with_sharding_constraint(x, everywhere)
        return rows.mean(0) if kind.is_per_replica else rows

    return jax.jit(lambda tree: jax.tree.map(merge, tree, kinds))(tree)
