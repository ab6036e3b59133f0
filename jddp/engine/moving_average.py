"""A moving average of the parameters, to evaluate with.

NoAverage    none
Ema          an exponential moving average
"""

import dataclasses
from typing import final

import optax

from jddp.engine.protocols import MovingAverage
from jddp.engine.state import TrainState, widened
from jddp.errors import ConfigError, check_choice
from jddp.typing import Params


@final
@dataclasses.dataclass(frozen=True)
class NoAverage:
    """Keeps no average."""

    def init(self, params: Params) -> Params:
        """Returns None."""
        return None

    def __call__(self, after: TrainState) -> TrainState:
        """Returns the state as it is."""
        return after


@final
@dataclasses.dataclass(frozen=True)
class Ema:
    """Keeps an exponential moving average, which begins with the first parameters.

    Attributes:
      decay: Weight of the average before the step.
    """

    decay: float

    def init(self, params: Params) -> Params:
        """Returns the parameters, in float32 at least."""
        # In bfloat16 a decay of 0.999 is 1, and the average would never move.
        return widened(params)

    def __call__(self, after: TrainState) -> TrainState:
        """Moves the average towards the parameters."""
        # Each replica averages what it holds: parameters that are equal give equal averages, so
        # nothing is sent. With local steps each replica has its own average, which is merged when
        # read.
        moved = optax.incremental_update(widened(after.params), after.ema_params, 1 - self.decay)
        return after.replace(ema_params=moved)


def choose_average(decay: float | None) -> MovingAverage:
    """Returns the average of this decay.

    Raises:
      ConfigError: If it is not between 0 and 1.
    """
    if decay is not None and not 0 < decay < 1:
        raise ConfigError(f"ema_decay is between 0 and 1, or None; got {decay}.")
    return NoAverage() if decay is None else Ema(decay)


def chosen_params(state: TrainState, name: str) -> Params:
    """Returns the parameters of a state, or for "ema" their average, in the same dtypes.

    Raises:
      ConfigError: If there is no such name, or no average.
    """
    check_choice("params", name, ("params", "ema"))
    if name == "ema" and state.ema_params is None:
        raise ConfigError("params='ema' needs DataParallel(..., ema_decay=...).")
    return optax.tree.cast_like(state.ema_params, state.params) if name == "ema" else state.params
