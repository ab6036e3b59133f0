"""A step as a value made of parts, one for each question; and which options go together.

    step = make_step_spec(model, tx, loss_fn, accumulate_steps=4, logical_replicas=None, ...)
    step.backward       MicroBatches: how a replica's rows become gradients
    step.replicas       Devices: which rows a replica has, and how sums are added

What varies between steps is a part, chosen here once; the step itself asks nothing.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax

from jddp.engine.average import Ema, NoAverage
from jddp.engine.backward import (
    MicroBatches,
    OneBatch,
    OverlappedBatch,
    OverlappedMicroBatches,
    drop_empty,
    keep_all,
    start_if_half,
    start_per_entry,
)
from jddp.engine.guard import NoGuard, choose_guard, unscaled
from jddp.engine.optimizer import ReplicatedOptimizer, Zero1
from jddp.engine.replicas import Devices, LogicalReplicas
from jddp.engine.sync import EveryStep, LocalSteps
from jddp.engine.unused import Refuse, Skip, Zero
from jddp.engine.view import ClipByGlobalNorm, NoClip, Shard, View
from jddp.errors import ConfigError
from jddp.modules.functional import FlaxModel
from jddp.reduce import Reduction, choose_layout, make_reduction
from jddp.reduce.hooks import as_is
from jddp.reduce.packing import bucketed, name_of, pairwise, scattered
from jddp.typing import LossFn

UNUSED = {"zero": Zero, "skip": Skip, "error": Refuse}
# Pairs of options that cannot be combined, and why.
REFUSED = {
    ("logical_replicas", "shard_optimizer"): "an update of a shard is computed in other vectors",
    ("logical_replicas", "local_steps"): "local steps depend on the number of devices",
    (
        "logical_replicas",
        "comm_hook",
    ): "gradients are added in one order, which a hook does not keep",
    ("logical_replicas", "wire_dtype"): "sums on the wire would round by the number of devices",
    ("logical_replicas", "overlap"): "gradients of several replicas are added before any is sent",
    ("local_steps", "shard_optimizer"): "each replica updates all of its own parameters",
    ("local_steps", "comm_hook"): "a hook reduces gradients in each step; see wire_dtype",
}


@dataclasses.dataclass(frozen=True)
class Step:
    """The parts of a step.

    Attributes:
      model: The model.
      eval_fn: The loss for evaluation.
      backward: How a replica's rows become gradients.
      replicas: Which rows a replica has, and in what order sums are added.
      reduction: In what form gradients travel, and how they are averaged.
      sync: When replicas synchronize.
      clip: What the mean gradient is clipped to.
      optimizer: The update, of all parameters or of a shard.
      average: A moving average of the parameters.
      guard: Which steps count, and the loss scale.
    """

    model: FlaxModel
    eval_fn: LossFn
    backward: OneBatch
    replicas: Devices
    reduction: Reduction
    sync: EveryStep
    clip: NoClip
    optimizer: ReplicatedOptimizer
    average: NoAverage
    guard: NoGuard

    @property
    def axis(self) -> str:
        """Name of the axis of the replicas."""
        return self.reduction.axis

    @functools.cached_property
    def view(self) -> View:
        """What one replica holds of the mean gradient: it follows from how and when it is sent."""
        return self.sync.view((Shard if self.reduction.keeps_parts else View)(self.axis))


def make_step_spec(
    model: FlaxModel,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    *,
    axis: str,
    platform: str,
    bucket_mb: Any,
    first_bucket_mb: float,
    last_bucket_mb: float | None,
    layout: str,
    overlap: Any,
    wire_dtype: Any,
    comm_hook: Any,
    accumulate_steps: int,
    shard_optimizer: bool,
    logical_replicas: int | None,
    local_steps: LocalSteps | None,
    max_grad_norm: float | None,
    ema_decay: float | None,
    unused_parameters: str,
    skip_nonfinite: bool,
    loss_scale: Any,
    eval_fn: LossFn,
) -> Step:
    """Chooses the parts of a step for options as `jddp.DataParallel` describes them.

    Raises:
      ConfigError: If an option breaks its rule, or does not go with another.
    """
    _refuse_pairs(
        logical_replicas=logical_replicas,
        local_steps=local_steps,
        shard_optimizer=shard_optimizer,
        comm_hook=comm_hook,
        wire_dtype=wire_dtype,
        overlap=overlap is True,
    )
    _check_optimizer(tx, accumulate_steps)
    _check_numbers(accumulate_steps, max_grad_norm, ema_decay)
    if unused_parameters not in UNUSED:
        raise ConfigError(
            f"unused_parameters {unused_parameters!r} is unknown. "
            f"Choose one of {', '.join(map(repr, UNUSED))}."
        )
    # Between outer steps nothing is sent, and logical replicas are added up before anything is.
    overlap = overlap if local_steps is None and logical_replicas is None else False
    chosen, overlaps = choose_layout(layout, overlap, lambda: platform)
    if logical_replicas is not None:
        packed = pairwise(chosen, logical_replicas)
    elif shard_optimizer and comm_hook is None:
        packed = scattered(chosen, platform)
    else:
        packed = bucketed(chosen, comm_hook)
    reduction = make_reduction(
        axis,
        packed,
        hook_name="" if comm_hook is None else name_of(comm_hook),
        seen=as_is if loss_scale is None or comm_hook is None else unscaled,
        bucket_mb=bucket_mb,
        first_bucket_mb=first_bucket_mb,
        last_bucket_mb=last_bucket_mb,
        wire_dtype=wire_dtype,
    )
    backward = (OverlappedBatch if overlaps else OneBatch)(
        model,
        loss_fn,
        start=start_if_half if loss_scale is None else start_per_entry,
        guard=keep_all if model.batch_norm == "sync" else drop_empty,
    )
    unused = UNUSED[unused_parameters]()
    return Step(
        model=model,
        eval_fn=eval_fn,
        backward=with_micro_batches(backward, accumulate_steps),
        replicas=(
            Devices(axis, model)
            if logical_replicas is None
            else LogicalReplicas(axis, model, logical_replicas)
        ),
        reduction=reduction,
        sync=local_steps or EveryStep(),
        clip=NoClip() if max_grad_norm is None else ClipByGlobalNorm(max_grad_norm),
        optimizer=(
            Zero1(tx, unused, reduction) if shard_optimizer else ReplicatedOptimizer(tx, unused)
        ),
        average=NoAverage() if ema_decay is None else Ema(ema_decay),
        guard=choose_guard(loss_scale, skip_nonfinite, model.keeps_own),
    )


def with_micro_batches(backward: OneBatch, num: int) -> OneBatch:
    """Returns the same gradients, from another number of micro-batches."""
    fields = (backward.model, backward.loss_fn, backward.start, backward.guard)
    if num == 1:
        return (OverlappedBatch if backward.overlaps else OneBatch)(*fields)
    return (OverlappedMicroBatches if backward.overlaps else MicroBatches)(*fields, num)


def _refuse_pairs(**given: Any) -> None:
    for pair, why in REFUSED.items():
        if all(given[name] for name in pair):
            raise ConfigError(f"{' and '.join(pair)} cannot be combined: {why}. Leave one out.")


def _check_numbers(
    accumulate_steps: int, max_grad_norm: float | None, ema_decay: float | None
) -> None:
    if accumulate_steps < 1:
        raise ConfigError(f"accumulate_steps is at least 1; got {accumulate_steps}.")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ConfigError(f"max_grad_norm is positive, or None; got {max_grad_norm}.")
    if ema_decay is not None and not 0 < ema_decay < 1:
        raise ConfigError(f"ema_decay is between 0 and 1, or None; got {ema_decay}.")


def _check_optimizer(tx: optax.GradientTransformation, accumulate_steps: int) -> None:
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ConfigError(
            f"optimizer is of type {type(tx).__name__}. Give an optax optimizer: "
            "optax.adam(1e-3), not optax.adam; of an nnx.Optimizer its .tx."
        )
    if accumulate_steps > 1 and _is_multi_steps(tx):
        raise ConfigError(
            "optax.MultiSteps beside accumulate_steps would reduce once per part and count "
            "steps twice. Drop optax.MultiSteps: accumulate_steps reduces once for all parts."
        )


def _is_multi_steps(tx: optax.GradientTransformation) -> bool:
    """Whether `optax.MultiSteps` is anywhere in it; its state tells."""
    params = {"w": jax.ShapeDtypeStruct((1, 1), np.float32)}
    states = jax.tree.leaves(jax.eval_shape(tx.init, params), is_leaf=_is_multi_steps_state)
    return any(map(_is_multi_steps_state, states))


def _is_multi_steps_state(state: Any) -> bool:
    return isinstance(state, optax.MultiStepsState)
