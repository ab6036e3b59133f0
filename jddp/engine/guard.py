"""Clipping, the moving average of the new parameters, and whether the step counts.

Every step counts, or one with numbers that are not finite changes nothing but counts; and the loss
scale is fixed, or follows overflows.

A loss scale keeps gradients of float16 arithmetic from becoming zero. float16 has no number between
0 and 2^-24 and none above 65,504. So the backward pass starts from a scale in place of 1, and
gradients are divided by it in float32, once they are averaged. "dynamic" looks for the largest
scale that fits: it doubles after so many good steps, and halves where gradients overflow; such a
step is skipped. Every scale is a power of two, so that it costs no bit.

An average of parameters needs the batch statistics of these parameters: floating values of the
other state are averaged with them.

References:
  Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
  https://arxiv.org/abs/1710.03740. The defaults equal PyTorch's `torch.amp.GradScaler`; the
  smallest and the largest scale are added here.
"""

import dataclasses
import functools
from typing import Any, final

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jddp.engine.micro_batches import Scale, View
from jddp.engine.state import KeepsOwn, TrainState, Values, is_float, own_layouts, widened
from jddp.ground.errors import ConfigError
from jddp.ground.typing import Grads, HookState, Metrics, PyTree
from jddp.modules.base import is_frozen
from jddp.modules.metrics import mean_tree
from jddp.reduce.hooks import CommHook, GradBucket, Units

DYNAMIC = "dynamic"
FIRST = 2.0**16
LEAST, MOST = 1.0, 2.0**24
ALLOWED = (None, DYNAMIC, *(2.0**power for power in range(25)))
GROWTH_INTERVAL = 2000  # Good steps before the scale doubles.
Outcome = tuple[TrainState, Metrics]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """A scale, and how long it has been good.

    Attributes:
      scale: Factor of the loss in the backward pass; a float32 scalar.
      num_good: Number of steps since it changed, or since one was skipped; an int32 scalar.
    """

    # JAX also fills these fields with layouts and shardings.
    scale: Any
    num_good: Any


def adjust(before: LossScale, is_finite: Array, *, interval: int = GROWTH_INTERVAL) -> LossScale:
    """The scale after a step: half, the same, or after `interval` good steps twice."""
    is_grown = is_finite & (before.num_good + 1 >= interval)
    # Powers of two alone: scaling and its inverse then change exponents, and no digit.
    factor = jnp.where(is_finite, jnp.where(is_grown, 2.0, 1.0), 0.5)
    return LossScale(
        scale=jnp.clip(before.scale * factor, LEAST, MOST),
        num_good=jnp.where(is_finite & ~is_grown, before.num_good + 1, 0),
    )


@final
@dataclasses.dataclass(frozen=True)
class Guard:
    """Which steps count, and the loss scale.

    Attributes:
      loss_scale: Factor of the loss in the backward pass; the first one, if it is dynamic.
      keeps_own: Whether each replica has its own of a leaf of `model_state`, by path and leaf.
      skips: Whether a step counts only if its loss, gradients and other state are finite.
      follows_overflows: Whether the loss scale changes from step to step; such a guard skips too.
    """

    loss_scale: float
    keeps_own: KeepsOwn
    skips: bool = False
    follows_overflows: bool = False

    def init(self) -> PyTree:
        """Returns the first `CommState.loss_scale`; () for a fixed one."""
        if not self.follows_overflows:
            return ()
        return LossScale(jnp.float32(self.loss_scale), jnp.int32(0))

    def scale(self, state: TrainState) -> Scale:
        """Returns the loss scale of the step that starts from this state."""
        scale = state.comm_state.loss_scale
        return scale.scale if isinstance(scale, LossScale) else self.loss_scale

    def accept(self, before: TrainState, after: TrainState, numbers: PyTree, view: View) -> Outcome:
        """Returns the state after a good step, else the state before it; and metrics of the guard.

        Args:
          before: State before the step, of one replica.
          after: State that the step has computed.
          numbers: Loss and gradients, which must be finite.
          view: View of the replica on the mean gradient.
        """
        if not (self.skips or self.follows_overflows):
            return after, {}
        found = find_nonfinite(before, after, numbers, view, self.keeps_own)
        after, metrics = after_good_step(found, before, after)
        if not isinstance(before.comm_state.loss_scale, LossScale):
            return after, metrics
        # A smaller scale is no help to other state, which the forward pass writes.
        scale = adjust(before.comm_state.loss_scale, found < 2)
        after = after.replace(comm_state=dataclasses.replace(after.comm_state, loss_scale=scale))
        return after, {**metrics, "loss_scale": self.scale(before)}


def limited(
    limit: jax.typing.ArrayLike | None, before: TrainState, after: TrainState, loss: Array
) -> Outcome:
    """Returns the state before a step whose loss is above the limit; None is no limit."""
    if limit is None:
        return after, {}
    # A loss that is not finite is left to the guard, which may lower the loss scale. The loss is of
    # the global batch: each replica has the same verdict.
    return after_good_step(jnp.isfinite(loss) & (loss > limit), before, after)


def find_nonfinite(
    before: TrainState, after: TrainState, numbers: PyTree, view: View, keeps_own: KeepsOwn
) -> Array:
    """Returns 2 if a loss or gradient is not finite, else 1 if a number of other state is not.

    The verdict is the same on every replica; it is 0 where all is finite.
    """
    states = before.model_state, after.model_state
    # Other state that was not finite before the step may stay so.
    stays = [
        (jnp.isfinite(new) | ~jnp.isfinite(old)).all()
        for old, new in zip(*map(jax.tree.leaves, states), strict=True)
        if jnp.issubdtype(new.dtype, jnp.inexact)
    ]
    fits = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(numbers)]).all()
    found = jnp.where(fits, jnp.where(jnp.stack([fits, *stays]).all(), 0, 1), 2)
    layouts = jax.tree.leaves(own_layouts(states[1], keeps_own))
    # The verdict must be the same on all replicas: one that skipped alone would from then on have
    # other parameters, and take other branches, in which collectives would wait forever. The mean
    # gradient shows every replica the same; shards and per-replica values do not, so the largest
    # finding is taken.
    if view.differs or any(layout.is_per_replica for layout in layouts):
        with jax.named_scope("metrics"):
            found = jax.lax.pmax(found, view.axis)
    return found


def after_good_step(found: Array, before: TrainState, after: TrainState) -> Outcome:
    """Returns the state after the step if nothing was found, else before it; and "skipped"."""
    choose = functools.partial(jnp.where, found == 0)
    # The step counts, though it is skipped: its batch is consumed, and repeated with the same
    # number it would use the same random numbers.
    skipped = before.replace(step=after.step, skipped=before.skipped + 1)
    # `where`, and not a `cond`: both states are there, and XLA fuses the choice with the update.
    after = jax.tree.map(choose, after, skipped)
    return after, {"skipped": after.skipped.astype(jnp.float32)}


def choose_guard(loss_scale: float | str | None, skips: bool, keeps_own: KeepsOwn) -> Guard:
    """Returns the guard of these options, as `jddp.DataParallel` describes them.

    Raises:
      ConfigError: If it is no loss scale.
    """
    if loss_scale is True or loss_scale not in ALLOWED:
        raise ConfigError(
            f"loss_scale is 'dynamic', a power of two from 1 to 2**24, which costs no bit, or "
            f"None; got {loss_scale!r}."
        )
    if isinstance(loss_scale, str):
        return Guard(FIRST, keeps_own, follows_overflows=True)
    return Guard(loss_scale or 1.0, keeps_own, skips)


@final
@dataclasses.dataclass(frozen=True)
class Clip:
    """Scales gradients down to a global norm, as optax's function of this name does.

    Attributes:
      limit: The largest norm; None leaves gradients as they are.

    Raises:
      ConfigError: If the limit is not positive.
    """

    limit: float | None

    def __post_init__(self) -> None:
        """Refuses a limit that is not positive."""
        if self.limit is not None and not self.limit > 0:
            raise ConfigError(f"max_grad_norm is positive, or None; got {self.limit}.")

    def __call__(self, grads: Grads, view: View) -> tuple[Grads, Metrics]:
        """Returns the clipped gradients, and "grad_norm": their norm before."""
        limit = self.limit
        if limit is None:
            return grads, {}
        # Takes the norm in float32, since the squares of a norm of 256 overflow float16.
        exact = widened(grads)
        norm = view.norm(exact)
        # Repeats the operations of optax's own clipping, so that results equal the results of one
        # device.
        clipped = jax.tree.map(
            lambda x: jnp.where(norm < limit, x, x / norm.astype(x.dtype) * limit), exact
        )
        return optax.tree.cast_like(clipped, grads), {"grad_norm": view.metric(norm)}


def unscaled(hook: CommHook, units: Units) -> CommHook:
    """Returns a hook that is called with the gradients that it would get without a loss scale.

    With it, hook state, such as an error of compression, would have the scale of another step.
    """

    # The scale is traced and changes between steps, so it cannot stand in the bucket, whose `scale`
    # is static: the hook is wrapped in each step.
    def reduce(bucket: GradBucket, state: HookState, axis: str) -> tuple[GradBucket, HookState]:
        # Even without a loss scale, float16 could not hold sums over all entries.
        hidden = 1.0 if bucket.planned.dtype == jnp.float16 else units.backward_scale
        scale = jnp.float32(hidden * units.loss_scale)
        plain = dataclasses.replace(mean_tree(bucket, scale), scale=bucket.scale * hidden)
        got, state = hook.reduce(plain, state, axis)
        return dataclasses.replace(mean_tree(got, 1 / scale), scale=bucket.scale), state

    return hook._replace(reduce=reduce)


@final
@dataclasses.dataclass(frozen=True)
class Average:
    """An exponential moving average of the parameters, which begins with the first values.

    Attributes:
      decay: Weight of the average before the step; None for no average.

    Raises:
      ConfigError: If the decay is not between 0 and 1.
    """

    decay: float | None

    def __post_init__(self) -> None:
        """Refuses a decay out of range."""
        if self.decay is not None and not 0 < self.decay < 1:
            raise ConfigError(f"ema_decay is between 0 and 1, or None; got {self.decay}.")

    def init(self, state: TrainState) -> TrainState:
        """Returns the state with its first average, in float32 at least."""
        if self.decay is None:
            return state
        # In bfloat16 a decay of 0.999 is 1, and the average would never move.
        params, model_state = jax.tree.map(jnp.copy, _averaged(state))
        return state.replace(ema_params=params, ema_state=model_state)

    def __call__(self, before: TrainState, after: TrainState) -> TrainState:
        """Moves the average towards the parameters and the other state after an update."""
        if (decay := self.decay) is None:
            return after
        # Each replica averages what it holds: parameters that are equal give equal averages, so
        # nothing is sent. With local steps each replica has its own average, which is merged when
        # read.
        held = after.ema_params, after.ema_state
        # The formula has one product. With two, XLA would contract one of them with the sum, and
        # the choice would depend on the shape: rows of logical replicas would have other bits on
        # other numbers of devices.
        moved = jax.tree.map(
            lambda old, new: old + (1 - decay) * (new - old), held, _averaged(after)
        )
        return after.replace(ema_params=moved[0], ema_state=moved[1])


def _averaged(state: TrainState) -> Values:
    """The averaged values: parameters, and floating values of other state; None for the rest."""
    return widened(state.params), jax.tree_util.tree_map_with_path(
        lambda path, x: widened(x) if is_float(x) and not is_frozen(path) else None,
        state.model_state,
    )
