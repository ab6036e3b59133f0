"""When the gradients of a replica leave: after its backward passes, or inside the last one.

    AfterPasses       all passes are run, then the reduction
    InsideLastPass    the reduction runs the last backward pass, bucket by bucket, and each bucket
                      is sent while the pass continues

The numbers are the same.
"""

from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jddp.engine.micro_batches import (
    Local,
    MicroBatches,
    ScaleOf,
    drop_empty,
    keep_all,
    start_if_half,
    start_per_entry,
)
from jddp.engine.state import Inputs, TrainState
from jddp.errors import ConfigError
from jddp.modules.base import FlaxModel
from jddp.reduce.backward import trace_backward
from jddp.reduce.gradients import Finished, Running
from jddp.reduce.plan import BucketPlan
from jddp.typing import LossFn


@final
@dataclass(frozen=True)
class AfterPasses:
    """Gradients are finished before the first bucket leaves."""

    def __call__(
        self,
        passes: MicroBatches,
        state: TrainState,
        inputs: Inputs,
        key: Array,
        loss_scale: ScaleOf,
    ) -> Local:
        """Runs all micro-batches in one loop."""
        scale, running = loss_scale(state), passes.running(state, inputs)
        take = passes.split(inputs, key)
        total = passes.accumulate(state, running, take, passes.num, scale)
        # Back to the parameters' dtypes, in which gradients are planned, sent and given to optax.
        grads = jax.tree.map(lambda g, x: g.astype(x.dtype), total.grads, state.params)
        units = passes.units(state.params, total.sums, scale)
        model_state = running.finish(total.model_state)
        return Local(Finished(grads), total.sums, model_state, units)

    def note(self, plan: BucketPlan, num_looped: int) -> BucketPlan:
        """Notes that nothing is overlapped."""
        return plan.noted("overlap off: buckets leave after the backward pass")


@final
@dataclass(frozen=True)
class InsideLastPass:
    """The reduction runs the last backward pass, outside of the loop over micro-batches."""

    def __call__(
        self,
        passes: MicroBatches,
        state: TrainState,
        inputs: Inputs,
        key: Array,
        loss_scale: ScaleOf,
    ) -> Local:
        """Runs all micro-batches, but for the last backward pass, which is traced alone."""
        take, scale = passes.split(inputs, key), loss_scale(state)
        running = passes.running(state, inputs)
        # The last micro-batch stands outside the scan: a loop is one equation, so buckets could
        # only be sent at its end. Only in the last backward pass are the sums of gradients
        # finished, one by one.
        total = passes.accumulate(state, running, take, passes.num - 1, scale)
        carried, last = total.model_state, passes.num - 1
        run = passes.linearize(state, running.before(carried), take(last))
        earlier = jax.tree.leaves(total.grads)

        def finish(i: int, x: Array) -> Array:
            # NaN of an empty micro-batch is replaced before the earlier gradients are added to it.
            x = run.finish(x)
            if not earlier:
                return x
            return (x.astype(earlier[i].dtype) + earlier[i]).astype(x.dtype)

        backward = trace_backward(lambda one: run.backward(one * scale))
        # Sums need no reduction inside the pass: they are sent after it, in one small vector.
        sums = jax.tree.map(jnp.add, total.sums, run.sums) if earlier else run.sums
        units = passes.units(state.params, sums, scale)
        model_state = running.finish(running.add(carried, last, run.model_state))
        return Local(Running(backward, finish), sums, model_state, units)

    def note(self, plan: BucketPlan, num_looped: int) -> BucketPlan:
        """Notes that buckets overlap with the pass, and which gradients a loop holds back."""
        notes = ["overlap on: buckets leave inside the backward pass"]
        if num_looped:
            notes.append(f"{num_looped} gradients leave a loop at once: they are ready at its end")
        return plan.noted(*notes)


def choose_backward(
    model: FlaxModel, loss_fn: LossFn, num: int, *, overlaps: bool, is_scaled: bool
) -> MicroBatches:
    """Returns the part of a step that computes gradients.

    Args:
      model: The model.
      loss_fn: The loss.
      num: Number of micro-batches.
      overlaps: Whether buckets are sent inside the backward pass.
      is_scaled: Whether there is a loss scale.

    Raises:
      ConfigError: If the number is less than 1.
    """
    if num < 1:
        raise ConfigError(f"accumulate_steps is at least 1; got {num}.")
    start = start_per_entry if is_scaled else start_if_half
    # Statistics of the global batch have valid rows wherever the step has; those of one replica's
    # rows may have none, and 0 / 0 is NaN.
    guard = keep_all if model.batch_norm == "sync" else drop_empty
    schedule = InsideLastPass() if overlaps else AfterPasses()
    return MicroBatches(model, loss_fn, start, guard, num, schedule)
