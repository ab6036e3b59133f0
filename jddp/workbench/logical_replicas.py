"""A step on a fixed number of replicas, bitwise the same on any number of devices that divides it.

A device runs several replicas one after the other. Sums are taken in one order, so that results do
not depend on the number of devices. The computation of a replica stands between barriers, and so do
the sums: else fusion would depend on the number of replicas that a device runs.

XLA compiles a program for several partitions by other passes than a program for one device. The
partitioner merges equal operations before the first algebraic simplification: Shardy merges equal
constants and broadcasts of scalars, and the partitioner's clean-up runs a common subexpression
elimination. On one device nothing is merged until later. Some rewrites depend on the number of
users of an operand: `a / broadcast(b)` becomes `a * broadcast(1 / b)` only where the broadcast has
one user. A softmax divides by its sum twice, forward and backward: with merged broadcasts it keeps
the division, with unmerged ones it loses it, and the last bit differs.

So equal operations are merged here (`MergedProgram`), before XLA, on any number of devices, and
XLA's own pass is switched off: the partitioner then finds nothing to merge. Calls are inlined
first, because XLA inlines them before it partitions, and operations of two calls may be equal too.
On GPUs two more passes are off (`PASSES`). Passes that `XLA_FLAGS` disables run in such a program:
an option replaces the flag of its name.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import TypeVar, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr
from jax.extend.mlir import ir, passmanager
from jax.sharding import Mesh
from jax.stages import Wrapped
from jaxtyping import Array, Float

from jddp.engine.calls import checks_for_nan
from jddp.engine.micro_batches import Local, MicroBatches, ScaleOf
from jddp.engine.state import Inputs, TrainState, key_of_replica, own_layouts
from jddp.engine.step import Evaluate, Function, Places, Replicas, XlaOptions
from jddp.engine.strategy import Strategy
from jddp.ground.errors import ConfigError
from jddp.ground.jaxprs import axes_of, equations
from jddp.ground.numbers import add_in_pairs
from jddp.ground.typing import Batch, HookState, ModelState, Path, PyTree, Tree
from jddp.modules.base import TILED, FlaxModel
from jddp.modules.forward import combine
from jddp.modules.metrics import Sums, add_sums
from jddp.modules.rows import check_rows, split_rows
from jddp.reduce.backward import Finished
from jddp.reduce.hooks import BucketLayout, CommHook, GradBucket, Packed, Packing, leaves_of
from jddp.reduce.shards import pack, unpack

DISABLED = "xla_disable_hlo_passes"
# The effects of these passes depend on the number of partitions. The first one merges equal
# operations before or after other rewrites. The others matter on GPUs alone: one simplifies before
# the partitioner, where products are not yet in one form, and one lets sums share a kernel by the
# order in which they stand.
PASSES = ("cse", "spmd-simplify", "multi_output_fusion")


@dataclasses.dataclass(frozen=True)
class LogicalReplicas(Strategy):
    """A step that is defined on a fixed number of replicas, whatever the number of devices.

    Results are bitwise identical on any number of CPU devices that divides the number of replicas;
    on GPUs see docs/bitwise.md.

    Attributes:
      number: Number of replicas.

    Raises:
      ConfigError: If there is less than one.
    """

    number: int = dataclasses.field()  # Drops the default of the base class.
    name = "logical replicas"
    sends_buckets = False

    def __post_init__(self) -> None:
        """Refuses a number out of range."""
        if self.number < 1:
            raise ConfigError(f"LogicalReplicas: number is at least 1; got {self.number}.")

    def replicas(self, axis: str, model: FlaxModel) -> Replicas:
        """Returns the replicas of a model."""
        return FixedReplicas(axis, model, self.number)

    def packed(self, layout: BucketLayout, hook: CommHook | None, mesh: Mesh) -> Packed:
        """Returns the packing of rows of sums; there is no custom hook."""
        return pack_rows(layout, self.number)


@final
@dataclasses.dataclass(frozen=True)
class FixedReplicas(Replicas):
    """A fixed number of replicas, whatever the number of devices.

    Attributes:
      num: Number of logical replicas.
    """

    num: int = dataclasses.field()  # Drops the default of the base class.
    noun = "logical replicas"

    def total(self, num_devices: int) -> int:
        """Returns `num`, if it divides over the devices."""
        check_rows(self.num, num_devices, f"{num_devices} devices", "LogicalReplicas")
        return self.num

    def jit(self, function: Function, options: XlaOptions = None, donated: Places = ()) -> Wrapped:
        """Jits to a program that XLA simplifies the same way on any mesh."""
        return MergedProgram(function, options, donated)

    def enter(self, state: Tree, layouts: PyTree) -> Tree:
        """Returns the state as it is: a device has a row for each of its replicas."""
        return state

    def leave(self, state: Tree, layouts: PyTree) -> Tree:
        """Returns the state as it is."""
        return state

    def check(self, forward: Jaxpr) -> None:
        """Refuses a model or loss with a collective, and a loss in tiles.

        Replicas run one after the other; and sums in tiles are rounded by how XLA compiles the
        loops around them, of which a device with one replica has one less.

        Raises:
          ConfigError: If there is one, with its name.
        """
        if any(TILED in str(eqn.source_info.name_stack) for eqn in equations(forward)):
            raise ConfigError(
                f"LogicalReplicas({self.num}): sums of a loss in tiles would depend on the number "
                "of devices. Compute all logits at once: loss.kwargs.tile_size=null, or "
                "next_token(..., tile_size=None)."
            )
        found = (eqn.primitive.name for eqn in equations(forward) if self.axis in axes_of(eqn))
        if name := next(found, None):
            raise ConfigError(
                f"LogicalReplicas({self.num}) runs replicas one after the other, and this model or "
                f"loss has a collective, {name!r} over axis {self.axis!r}. If it is a batch "
                "norm, choose batch_norm='local': each replica its own statistics. Else leave the "
                "collective out."
            )

    def run(
        self, backward: MicroBatches, loss_scale: ScaleOf, state: TrainState, inputs: Inputs
    ) -> Local:
        """Runs one replica after the other.

        Gradients, sums and per-replica state are rows, still to be summed.
        """
        num, first = self._own_replicas()
        rows = split_rows(inputs.rows, num)
        layouts = own_layouts(state.model_state, self.model.keeps_own)

        def own(i: int | Array) -> tuple[Batch, TrainState]:
            model_state = jax.tree.map(
                lambda x, k: x[i] if k.is_per_replica else x, state.model_state, layouts
            )
            return jax.tree.map(lambda x: x[i], rows), state.replace(model_state=model_state)

        def one(i: Array) -> tuple[PyTree, tuple[Sums, ModelState]]:
            # Barriers on both sides: a replica's program is compiled the same whether it is one of
            # many in a loop or the only one, which decides about the last bit.
            its_rows, replica = lax.optimization_barrier(own(i))
            given = inputs._replace(rows=its_rows)
            local = backward(replica, given, key_of_replica(replica, first + i), loss_scale)
            kept = local.sums, local.model_state
            return lax.optimization_barrier((local.grads.tree(), kept))

        # Gradients are summed pairwise as they are made: a row for each replica would take as many
        # times the memory of the parameters.
        grads, (sums, states) = sum_in_pairs(one, num)
        its_rows, replica = jax.eval_shape(own, 0)
        labels = backward.varying(replica, inputs._replace(rows=its_rows))
        model_state = _agree(self.model, state.model_state, states, labels)
        model_state = lax.optimization_barrier(model_state)
        units = backward.units(state.params, sums, loss_scale(state))
        return Local(Finished(grads), sums, model_state, units)

    def sum(self, sums: Sums) -> Sums:
        """Sums rows in one order."""
        return sum_in_order(lax.optimization_barrier(sums), axis=self.axis)

    def mean_count(self, sums: Sums) -> Float[Array, ""]:
        """Divides by the number of logical replicas."""
        return sums["loss"].count / self.num

    def separate(self, function: Callable[..., Tree], state: TrainState, *given: PyTree) -> Tree:
        """Keeps the function from being fused with the computation of its arguments.

        Sums are slices of the array that a device has received, and the slices depend on the
        number of devices.
        Fused with them, one of two products is added before it is rounded, as in `gradient / count
        + momentum * 0.9`, and which one it is depends on the slices.
        """
        # This branch is always taken, but XLA cannot know that. On CPUs XLA drops barriers before
        # it fuses, but it fuses nothing across the edge of a branch.
        shapes = jax.eval_shape(function, *given)

        def never(*given: PyTree) -> PyTree:
            return jax.tree.map(functools.partial(_filler, state.key), shapes)

        return lax.cond(state.step >= 0, function, never, *given)

    def evaluate(self, function: Evaluate, key: Array, rows: Batch, valid: Array) -> Sums:
        """Evaluates one replica after the other."""
        num, first = self._own_replicas()
        keys = jax.vmap(functools.partial(jax.random.fold_in, key))(first + jnp.arange(num))
        split = split_rows((rows, valid), num)

        def between_barriers(given: PyTree) -> Sums:
            sums: Sums = lax.optimization_barrier(function(*lax.optimization_barrier(given)))
            return sums

        return sum_in_order(lax.map(between_barriers, (*split, keys)), axis=self.axis)

    def _own_replicas(self) -> tuple[int, Array]:
        """How many replicas this device has, and the number of the first."""
        num = self.num // lax.axis_size(self.axis)
        return num, lax.axis_index(self.axis) * num


def sum_in_order(sums: Sums, *, axis: str) -> Sums:
    """Adds rows of totals and counts, of logical replicas of all devices, in one order."""
    return add_sums(sums, lambda x: add_in_pairs(lax.all_gather(x, axis, tiled=True)), ndim=1)


def _filler(key: Array, x: jax.ShapeDtypeStruct) -> Array:
    """Some array of the shape and dtype of `x`; keys cannot be zero."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jnp.broadcast_to(key, x.shape) if is_key else jnp.zeros(x.shape, x.dtype)


def _agree(model: FlaxModel, old: ModelState, rows: ModelState, labels: PyTree) -> ModelState:
    """Combines the state after the step of the replicas of this device, which are in rows."""

    def agree(path: Path, before: Array, rows: Array, label: int) -> Array:
        if model.keeps_own(path, rows):
            return rows
        rule = model.sync.rule(model.kinds_at(path))
        return combine(path, rule, before, rows, model.sync) if rule and label else rows[0]

    return jax.tree_util.tree_map_with_path(agree, old, rows, labels)


Kept = TypeVar("Kept")


def sum_in_pairs(function: Callable[[jax.Array], tuple[Tree, Kept]], num: int) -> tuple[Tree, Kept]:
    """Adds up the first results of `function(0)` to `function(num - 1)`, one after the other.

    `function` is traced once; of its first results there are 2 log2(num) at a time.

    Args:
      function: Function of a number that returns a tree to add up, and a tree to keep as it is.
      num: Number of calls.

    Returns:
      Rows: sums of as many as the largest power of two that divides `num`; `add_in_pairs`
      completes the sum. And all second results, stacked.
    """
    # The largest power of two that divides `num`. The numbers of a device begin at a multiple of
    # `num`, so a run of this length is a branch of the tree on every device; a longer one need not
    # be.
    block = num & -num

    def branch(start: jax.Array, size: int) -> tuple[Tree, Kept]:
        if size == 1:
            total, kept = function(start)
            return total, jax.tree.map(lambda x: x[None], kept)
        # A loop over two halves, not a running sum: a running sum adds in another order. A loop
        # also makes XLA compile the function once, in one form, whatever the number of calls.
        half = size // 2
        totals, kept = lax.map(lambda i: branch(start + i * half, half), jnp.arange(2))
        return jax.tree.map(lambda x: x[0] + x[1], totals), _in_one(kept)

    totals, kept = lax.map(lambda i: branch(i * block, block), jnp.arange(num // block))
    return totals, _in_one(kept)


def _in_one(tree: Tree) -> Tree:
    """Merges the first two dims."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


class RowsOfSums(Packing):
    """Rows of sums, cut to (rows, replicas, shard); each replica gets their whole mean.

    A barrier keeps the compiler from fusing the mean with its uses: the fusion, and so the last
    bit, would depend on the number of rows.
    """

    def pack(self, leaves: list[jax.Array], axis: str) -> jax.Array:
        """Cuts each row of the leaves, side by side."""
        return jax.vmap(lambda *rows: pack(rows, lax.axis_size(axis)))(*leaves)

    def unpack(self, bucket: GradBucket, axis: str) -> list[jax.Array]:
        """Puts the leaves together from the rows of all replicas."""
        return lax.optimization_barrier(leaves_of(bucket, unpack))

    def alone(self, leaf: jax.Array, axis: str) -> jax.Array:
        """Returns one of the rows, which are equal."""
        return leaf[0]


def pack_rows(layout: BucketLayout, num: int) -> Packed:
    """Rows of sums of `num` gradients in all, and a hook that makes their mean in one order.

    Each replica gets its shard of all rows, continues the sum where they end, and then all shards
    are gathered: the bytes of an all-reduce in a ring where each replica has one row.
    """

    def reduce(bucket: GradBucket, state: HookState, axis: str) -> tuple[GradBucket, HookState]:
        def mean(x: jax.Array) -> jax.Array:
            # Not an all-reduce: NCCL and gloo add in an order that depends on the number of
            # devices.
            rows = lax.all_to_all(x, axis, split_axis=1, concat_axis=0, tiled=True)
            return lax.all_gather(add_in_pairs(rows[:, 0]) / num, axis)

        return jax.tree.map(mean, bucket), state

    return RowsOfSums(layout), CommHook(lambda plan: (), reduce), ""


class MergedProgram:
    """A jitted function, in whose program equal operations are merged before it is compiled.

    Args:
      function: The function.
      options: XlaOptions of XLA.
      donated: Arguments whose memory the program reuses, by their places.
    """

    def __init__(self, function: Function, options: XlaOptions, donated: Places) -> None:
        passes = ",".join(filter(None, [str((options or {}).get(DISABLED, "")), *PASSES]))
        options = {**(options or {}), DISABLED: passes}
        self._jitted = jax.jit(function, compiler_options=options, donate_argnums=donated)
        self.trace = self._jitted.trace
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}

    def lower(self, *args: PyTree) -> jax.stages.Lowered:
        """Lowers the function for arguments, or for their shapes."""
        lowered: jax.stages.Lowered = self._jitted.lower(*args)
        # The module is changed in place: `lowered.compile()` compiles it.
        module = lowered.compiler_ir("stablehlo")
        assert isinstance(module, ir.Module)
        with module.context, ir.Location.unknown():
            _inline_calls(module)
            passmanager.PassManager.parse("builtin.module(symbol-dce,cse)").run(module.operation)
        return lowered

    def __call__(self, *args: PyTree) -> PyTree:
        """Calls the function, compiled for arguments of this form."""
        leaves, treedef = jax.tree.flatten(args)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):  # `jax.eval_shape` compiles nothing
            return self._jitted(*args)
        # Only a jitted function runs again, operation by operation, to find where the first NaN is.
        if checks_for_nan():
            return self._jitted(*args)
        # `jax.jit` would compile the unchanged program, so compiled ones are kept here, by the same
        # key: structure, types and shardings.
        form = treedef, tuple((jax.typeof(x), getattr(x, "sharding", None)) for x in leaves)
        if form not in self._compiled:
            self._compiled[form] = self.lower(*args).compile()
        return self._compiled[form](*args)


def _inline_calls(module: ir.Module) -> None:
    """Puts the body of each called function in the place of its call, nested ones included."""
    functions = {
        ir.StringAttr(op.operation.attributes["sym_name"]).value: op.operation for op in module.body
    }
    while calls := _calls(functions["main"]):
        for call in calls:
            callee = functions[ir.FlatSymbolRefAttr(call.attributes["callee"]).value].clone()
            [block] = callee.regions[0].blocks
            for parameter, value in zip(block.arguments, call.operands, strict=True):
                parameter.replace_all_uses_with(value)
            *body, end = block.operations
            for op in body:
                op.operation.move_before(call)
            for result, value in zip(call.results, end.operation.operands, strict=True):
                result.replace_all_uses_with(value)
            call.erase()
            callee.erase()


def _calls(function: ir.Operation) -> list[ir.Operation]:
    found = []

    def note(op: ir.Operation) -> ir.WalkResult:
        if op.name == "func.call":
            found.append(op)
        return ir.WalkResult.ADVANCE

    function.walk(note)
    return found
