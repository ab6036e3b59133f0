"""The parameters that a state is evaluated with: its own, the optimizer's, or a moving average.

An average of parameters needs the batch statistics of these parameters: floating values of the
other state are averaged with them. Optimizers that evaluate other parameters than they step are
known by the names in their state, so that a checkpoint shows them too:

    optax.contrib.schedule_free    x, from the iterates y and z
    optax.contrib.sam              the parameters before an adversarial step
"""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import final

import jax
import jax.numpy as jnp
import optax

from jddp.engine.optimizer import own_count
from jddp.engine.state import TrainState, Values, by_path, is_float, name_of, widened
from jddp.errors import ConfigError, check_choice
from jddp.modules.frozen import is_frozen
from jddp.typing import Leaf, ModelState, Params

log = logging.getLogger("jddp")

# Fields of the states of such optimizers: one that shows it, and the one with other parameters.
OTHERS = {"weight_sum": "z", "steps_since_sync": "cache"}
FIELDS = {*OTHERS, *OTHERS.values(), "b1"}
# Of a checkpoint of an earlier version.
UNAVERAGED = "The checkpoint has no average of batch statistics: the ones of the raw parameters %s."


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
        kept = {} if state.has_given_params else by_path(state.opt_state)
        kept = {name: kept[name] for name in read_in_evaluation(kept)}
        (params, kept), model_state = merge(((state.params, kept), state.model_state))
        return optimizer_params(params, kept), model_state
    if state.ema_params is None:
        raise ConfigError("params='ema' needs DataParallel(..., ema_decay=...).")
    params = optax.tree.cast_like(state.ema_params, state.params)
    return merge((params, with_average(state.model_state, state.ema_state)))


def read_in_evaluation(names: Iterable[str]) -> set[str]:
    """The arrays of an optimizer's state, by path, that `optimizer_params` may need."""
    return {name for name in names if not FIELDS.isdisjoint(name.split("/"))}


def optimizer_params(params: Params, kept: Mapping[str, Leaf]) -> Params:
    """The parameters with which an optimizer is evaluated; most evaluate the ones they step.

    Args:
      params: The parameters that the optimizer steps.
      kept: Arrays of its state by path, without rows for each replica; shards are flat.
    """
    values = by_path(params)
    for name, number in kept.items():
        above, field = name[: name.rfind("/") + 1], name[name.rfind("/") + 1 :]
        for path, x in values.items() if field in OTHERS else ():
            if (y := kept.get(f"{above}{OTHERS[field]}/{path}")) is None:
                continue  # masked
            y = widened(y if y.shape == x.shape else y.ravel()[: x.size].reshape(x.shape))
            if field == "weight_sum":  # as optax.contrib.schedule_free_eval_params
                b1 = widened(kept[f"{above}b1"])
                y = (widened(x) - (1 - b1) * y) / b1
            elif int(number) == 0:
                y = x
            y = y.astype(x.dtype)
            values[path] = jax.device_put(y, x.sharding) if isinstance(x, jax.Array) else y
    return jax.tree.unflatten(jax.tree.structure(params), values.values())
