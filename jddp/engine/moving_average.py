"""A moving average of the parameters, to evaluate with.

NoAverage    none
Ema          an exponential moving average

An average of parameters needs the batch statistics of these parameters: floating values of the
other state are averaged with them.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import final

import jax
import jax.numpy as jnp
import optax

from jddp.engine.protocols import MovingAverage
from jddp.engine.state import TrainState, Values, by_path, is_float, name_of, widened
from jddp.errors import ConfigError, check_choice
from jddp.modules.frozen import is_frozen
from jddp.typing import ModelState

log = logging.getLogger("jddp")

# Of a checkpoint of an earlier version.
UNAVERAGED = "The checkpoint has no average of batch statistics: the ones of the raw parameters %s."


@final
@dataclasses.dataclass(frozen=True)
class NoAverage:
    """Keeps no average."""

    def init(self, state: TrainState) -> TrainState:
        """Returns the state as it is."""
        return state

    def __call__(self, after: TrainState) -> TrainState:
        """Returns the state as it is."""
        return after


@final
@dataclasses.dataclass(frozen=True)
class Ema:
    """Keeps an exponential moving average, which begins with the first values.

    Attributes:
      decay: Weight of the average before the step.
    """

    decay: float

    def init(self, state: TrainState) -> TrainState:
        """Returns the state with its first average, in float32 at least."""
        # In bfloat16 a decay of 0.999 is 1, and the average would never move.
        params, model_state = jax.tree.map(jnp.copy, _averaged(state))
        return state.replace(ema_params=params, ema_state=model_state)

    def __call__(self, after: TrainState) -> TrainState:
        """Moves the average towards the parameters and the other state."""
        # Each replica averages what it holds: parameters that are equal give equal averages, so
        # nothing is sent. With local steps each replica has its own average, which is merged when
        # read.
        before = after.ema_params, after.ema_state
        params, model_state = optax.incremental_update(_averaged(after), before, 1 - self.decay)
        return after.replace(ema_params=params, ema_state=model_state)


def choose_average(decay: float | None) -> MovingAverage:
    """Returns the average of this decay.

    Raises:
      ConfigError: If it is not between 0 and 1.
    """
    if decay is not None and not 0 < decay < 1:
        raise ConfigError(f"ema_decay is between 0 and 1, or None; got {decay}.")
    return NoAverage() if decay is None else Ema(decay)


def _averaged(state: TrainState) -> Values:
    """What is averaged: parameters, and floating values beside them; None in place of others."""
    return widened(state.params), first_average(state.model_state)


def first_average(model_state: ModelState) -> ModelState:
    """The average of other state after one value of it."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: widened(x) if is_float(x) and not is_frozen(path) else None, model_state
    )


def with_average(model_state: ModelState, ema_state: ModelState) -> ModelState:
    """The other state with the averages that there are, in its own dtypes."""
    found = by_path(ema_state)
    if not found and jax.tree.leaves(first_average(model_state)):
        log.warning(UNAVERAGED, "are evaluated")
    return jax.tree_util.tree_map_with_path(
        lambda path, x: found[name].astype(x.dtype) if (name := name_of(path)) in found else x,
        model_state,
    )


def evaluated_values(state: TrainState, name: str, merge: Callable[[Values], Values]) -> Values:
    """Returns the parameters and the other state with which a state is evaluated.

    Args:
      state: The state.
      name: "params", or "ema" for the moving average, in the same dtypes.
      merge: Function that averages what each replica has its own of.

    Raises:
      ConfigError: If there is no such name, or no average.
    """
    check_choice("params", name, ("params", "ema"))
    if name == "params":
        return merge((state.params, state.model_state))
    if state.ema_params is None:
        raise ConfigError("params='ema' needs DataParallel(..., ema_decay=...).")
    params = optax.tree.cast_like(state.ema_params, state.params)
    return merge((params, with_average(state.model_state, state.ema_state)))
