"""An exponential moving average of the parameters, and of the statistics that belong to them.

An average of parameters needs the batch statistics of these parameters: floating values of the
other state are averaged with them.
"""

import dataclasses
from typing import final

import jax
import jax.numpy as jnp
import optax

from jddp.engine.state import (
    TrainState,
    Values,
    is_float,
    parts_in,
    widened,
)
from jddp.ground.errors import ConfigError
from jddp.ground.typing import Leaf, ModelState, OptState
from jddp.modules.base import is_frozen


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
        # With one product. Of two, XLA contracts one with the sum, and which one depends on the
        # shape: rows of logical replicas would have other bits on other numbers of devices.
        moved = jax.tree.map(
            lambda old, new: old + (1 - decay) * (new - old), held, _averaged(after)
        )
        # MultiSteps leaves parameters alone in most steps, by which their average is not to decay.
        if (count := own_count(after.opt_state)) is not None:
            is_updated = count > own_count(before.opt_state)
            moved = jax.tree.map(lambda new, old: jnp.where(is_updated, new, old), moved, held)
        return after.replace(ema_params=moved[0], ema_state=moved[1])


def own_count(opt_state: OptState) -> Leaf | None:
    """The updates so far of an optimizer that leaves out steps by itself; None of another."""
    leaves_out = parts_in(opt_state, optax.MultiStepsState, optax.ApplyIfFiniteState)
    counts = [x.count for x in parts_in(leaves_out, optax.ScaleByScheduleState)]
    counts += [x.gradient_step for x in parts_in(leaves_out, optax.MultiStepsState)]
    return counts[0] if counts else None


def _averaged(state: TrainState) -> Values:
    """The averaged values: parameters, and floating values of other state; None for the rest."""
    return widened(state.params), first_average(state.model_state)


def first_average(model_state: ModelState) -> ModelState:
    """The average of other state after one value of it."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: widened(x) if is_float(x) and not is_frozen(path) else None, model_state
    )
