"""A fixed number of replicas; a device runs several of them one after the other.

Sums are taken in one order, so that results do not depend on the number of devices. The
computation of a replica stands between barriers, and so do the sums: else fusion would depend on
the number of replicas that a device runs.
"""

import functools
from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr
from jax.stages import Wrapped
from jaxtyping import Array, Float

from jddp.engine.bitwise.merged_program import MergedProgram
from jddp.engine.bitwise.sums_of_calls import sum_in_pairs
from jddp.engine.micro_batches import Local, MicroBatches, ScaleOf
from jddp.engine.spec import Evaluate, Function, Places, Replicas, XlaOptions
from jddp.engine.state import Inputs, TrainState, key_of_replica, own_layouts
from jddp.ground.errors import ConfigError
from jddp.ground.jaxprs import axes_of, equations
from jddp.ground.typing import Batch, ModelState, Path, PyTree
from jddp.modules.base import FlaxModel
from jddp.modules.forward import combine
from jddp.modules.metrics import Sums, add_sums
from jddp.modules.rows import check_rows, split_rows
from jddp.reduce.backward import Finished
from jddp.reduce.shards import add_in_pairs


@final
@dataclass(frozen=True)
class FixedReplicas(Replicas):
    """A fixed number of replicas, whatever the number of devices.

    Attributes:
      axis: Name of the axis of the devices.
      model: The model.
      num: Number of logical replicas.
    """

    axis: str
    model: FlaxModel
    num: int
    noun = "logical replicas"

    def total(self, num_devices: int) -> int:
        """Returns `num`, if it divides over the devices."""
        check_rows(self.num, num_devices, f"{num_devices} devices", "LogicalReplicas")
        return self.num

    def jit(self, function: Function, options: XlaOptions = None, donated: Places = ()) -> Wrapped:
        """Jits to a program that XLA simplifies the same way on any mesh."""
        return MergedProgram(function, options, donated)

    def enter(self, state: PyTree, layouts: PyTree) -> PyTree:
        """Returns the state as it is: a device has a row for each of its replicas."""
        return state

    def leave(self, state: PyTree, layouts: PyTree) -> PyTree:
        """Returns the state as it is."""
        return state

    def check(self, forward: Jaxpr) -> None:
        """Refuses a model or loss with a collective: replicas run one after the other.

        Raises:
          ConfigError: If there is one, with its name.
        """
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

        def one(i: Array) -> tuple[PyTree, PyTree]:
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

    def separate(self, function: Function, state: TrainState, *given: PyTree) -> PyTree:
        """Keeps the function from being fused with the computation of its arguments.

        Sums are slices of the array that a device has received, and the slices depend on the
        number of devices.
        Fused with them, one of two products is added before it is rounded, as in `gradient / count
        + momentum * 0.9`, and which one it is depends on the slices.
        """
        # A branch that is always taken, which XLA cannot know: it drops barriers on CPUs before it
        # fuses, but fuses nothing across the edge of a branch.
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
