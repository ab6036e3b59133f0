"""The plan of a step for rows of one form: its buckets, and facts from its traced passes.

    plans = Plans(spec, mesh, rows)
    planned = plans.of(state, inputs)        # traces once for each form, computes nothing
    planned.plan, planned.sums, planned.uses_rng

Rows of another form may use other parameters, so they have other buckets too.
"""

import dataclasses
import functools
import logging
from collections.abc import Hashable

import jax
from jax.sharding import AbstractMesh, Mesh

from jddp.engine.calls import call
from jddp.engine.mesh import RowSplit
from jddp.engine.program import Form
from jddp.engine.spec import Step, TraceLoss
from jddp.engine.state import Inputs, TrainState, form_key, shapes_of
from jddp.engine.step import Traced, trace, trace_loss
from jddp.errors import ConfigError
from jddp.modules.metrics import Sums, weights_in
from jddp.reduce.plan import BucketPlan
from jddp.typing import Batch


@dataclasses.dataclass(frozen=True)
class Planned:
    """The plan of a step for rows of one form.

    Attributes:
      plan: The buckets.
      traced: Facts from the traced passes; None where there were no rows to trace with.
    """

    plan: BucketPlan
    traced: Traced | None = None

    @property
    def sums(self) -> Sums:
        """Shapes of the sums of loss and metrics; none without rows."""
        return {} if self.traced is None else self.traced.sums

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the loss and metrics that are scalars."""
        return tuple(name for name, x in self.sums.items() if x.is_scalar)

    @property
    def uses_rng(self) -> bool:
        """Whether model or loss use random numbers, such as dropout's.

        Those of a hook or an optimizer are the same on every replica, or sent as gradients are.
        """
        return self.traced is not None and self.traced.uses_rng


class Plans:
    """The plans of one spec on one mesh, for each form of a micro-batch.

    Args:
      spec: The parts of the step.
      mesh: The devices.
      rows: Division of rows into micro-batches.
    """

    def __init__(self, spec: Step, mesh: Mesh, rows: RowSplit) -> None:
        self._spec = spec
        self._mesh = mesh
        self._rows = rows
        self._planned: dict[Hashable, Planned] = {}

    def of(self, state: TrainState, inputs: Inputs) -> Planned:
        """The plan for the state of one replica and inputs of this process, or their shapes.

        Raises:
          ConfigError: If no gradient reaches a parameter, and unused_parameters is "error".
        """
        spec = self._spec
        if inputs.rows is None:
            return Planned(self._noted(spec.reducer.plan(state.params), state))
        # By the form of one micro-batch: the same micro-batch in a larger batch has the same
        # buckets, and is not traced again.
        part = self.micro_batch(inputs)
        form = form_key(part)
        if form not in self._planned:
            traced = call(trace, spec, self._mesh, shapes_of(state), part)
            if not self._planned:
                _warn_of_weights(inputs.rows, traced.sums)
                _warn_of_constant_keys(traced)
                _warn_of_micro_batches(traced, spec.backward.num)
            _refuse_constant_loss(traced)
            plan = spec.reducer.plan(state.params, traced.ready)
            loss = functools.partial(call, trace_loss, spec.backward, self._mesh, state, part)
            plan = self._noted(plan, state, traced.num_looped, loss)
            self._planned[form] = Planned(plan, traced)
        # Checked for each form of rows: another batch may leave other parameters unused.
        spec.optimizer.check_used(self._planned[form].plan)
        return self._planned[form]

    def micro_batch(self, inputs: Inputs) -> Inputs:
        """Shapes of the inputs of one micro-batch."""
        num_rows = self._rows.of_micro_batch(inputs.rows)
        rows, constants, _ = shapes_of(inputs)
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype), rows)
        return Inputs(rows, constants)

    def trace_as(self, form: Form, state: TrainState, inputs: Inputs) -> Traced:
        """Traces the passes over a micro-batch in another form.

        Args:
          form: The form.
          state: Shapes of the state of one replica.
          inputs: Inputs of this process, or their shapes.
        """
        spec = self._spec
        backward = dataclasses.replace(spec.backward, num=form.num_micro_batches)
        spec = dataclasses.replace(spec, backward=backward)
        mesh = AbstractMesh((form.num_replicas,), (spec.axis,))
        part = self.micro_batch(inputs)
        part = part._replace(rows=form.applied_to(part.rows))
        return call(trace, spec, mesh, shapes_of(state), part)

    def _noted(
        self, plan: BucketPlan, state: TrainState, num_looped: int = 0, loss: TraceLoss = None
    ) -> BucketPlan:
        """The plan, with notes on when buckets are sent, and on parameters that never are."""
        plan = plan.noted(*self._spec.model.notes(state.model_state))
        plan = self._spec.placement.note(plan, state.params, loss)
        return self._spec.sync.note(self._spec.backward.note(plan, num_looped))


def _refuse_constant_loss(traced: Traced) -> None:
    """Refuses a loss from which no parameter gets a gradient: nothing would be trained.

    Raises:
      ConfigError: If it is such a loss, whatever `unused_parameters` is: that is about single ones.
    """
    if traced.ready and all(ready is None for ready in traced.ready):
        raise ConfigError(
            "No gradient reaches any parameter: the loss does not depend on them. Return the loss "
            "as JAX computes it from the model's outputs, without stop_gradient, numpy or float()."
        )


def _warn_of_weights(batch: Batch, sums: Sums) -> None:
    if (names := weights_in(batch)) and sums["loss"].is_scalar:
        logging.getLogger("jddp").warning(
            f"The loss is a scalar, and the batch has {names[0]!r}: replicas are weighted equally, "
            "whatever the weights of their rows. If the loss is sum(l * w) / sum(w), return "
            "jddp.Mean(l * w, w) instead."
        )


def _warn_of_constant_keys(traced: Traced) -> None:
    if traced.has_constant_key:
        logging.getLogger("jddp").warning(
            "The loss uses random numbers of a key made from constants, such as "
            "jax.random.key(0) or nnx.Rngs(0): they are the same in every step and on every "
            "replica. Give loss_fn an argument `key`, which is another in each."
        )


def _warn_of_micro_batches(traced: Traced, num: int) -> None:
    if traced.has_batch_statistics:
        logging.getLogger("jddp").warning(
            f"accumulate_steps={num}: batch norm takes the statistics of each micro-batch, and not "
            "of the whole batch, so this is another step than that of the whole batch."
        )
