"""What a step is made of, and the rules that the parts keep."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jddp.errors import ConfigError
from jddp.flaxmodel import FlaxModel, LossFn
from jddp.forward import run_forward
from jddp.local_steps import LocalSteps
from jddp.loss_scale import check_loss_scale
from jddp.reduce import Reduction

PyTree = Any
UNUSED_PARAMETERS = ("zero", "skip", "error")


class Inputs(NamedTuple):
    """What a step is given beside the state.

    Attributes:
      rows: The batch, split over the replicas.
      constants: What the loss is handed as `constants`, on every replica; None for nothing.
    """

    rows: PyTree
    constants: PyTree = None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The parts of a step; `jddp.DataParallel` says what each means.

    Raises:
      ConfigError: If a part breaks its rule.
    """

    model: FlaxModel
    loss_fn: LossFn
    eval_fn: LossFn
    optimizer: optax.GradientTransformation
    reduction: Reduction
    accumulate_steps: int
    max_grad_norm: float | None
    ema_decay: float | None
    unused_parameters: str
    skip_nonfinite: bool
    loss_scale: float | str | None
    shard_optimizer: bool
    num_shards: int | None
    local_steps: LocalSteps | None

    def __post_init__(self) -> None:
        """Holds each part to its rule."""
        if self.accumulate_steps < 1:
            raise ConfigError(f"accumulate_steps is at least 1; got {self.accumulate_steps}.")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm is positive, or None; got {self.max_grad_norm}.")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError(f"ema_decay is between 0 and 1, or None; got {self.ema_decay}.")
        if self.unused_parameters not in UNUSED_PARAMETERS:
            raise ConfigError(
                f"unused_parameters {self.unused_parameters!r} is unknown. "
                f"Choose one of {', '.join(map(repr, UNUSED_PARAMETERS))}."
            )
        check_loss_scale(self.loss_scale)
        if self.accumulate_steps > 1 and _is_multi_steps(self.optimizer):
            raise ConfigError(
                "optax.MultiSteps beside accumulate_steps would reduce once per part and count "
                "steps twice. Drop optax.MultiSteps: accumulate_steps reduces once for all parts."
            )
        if self.num_shards is not None and self.shard_optimizer:
            raise ConfigError(
                "num_shards promises equal bits, and with shard_optimizer=True the last bit of an "
                "update depends on how arrays are cut: a part is computed in other vectors than "
                "the whole. Leave one of them out."
            )
        self._check_local_steps()

    def _check_local_steps(self) -> None:
        if self.local_steps is None:
            return
        if self.shard_optimizer:
            raise ConfigError(
                "shard_optimizer=True gives each replica a part of every parameter to update, and "
                "with local_steps each updates all of its own. Leave one of them out."
            )
        if self.num_shards is not None:
            raise ConfigError(
                "num_shards makes all replicas one run, equal on any number of them, and with "
                "local_steps each goes its own way. Leave one of them out."
            )
        if self.reduction.hook_name:
            raise ConfigError(
                f"comm_hook {self.reduction.hook_name!r} reduces gradients in each step, and with "
                "local_steps differences of parameters travel now and then. Leave it out; "
                "wire_dtype= makes them smaller."
            )

    @functools.cached_property
    def forward(self) -> Any:
        """`forward(params, model_state, rows, key, constants)`: `run_forward` in training.

        The plan, the step and each of its parts run the model; for rows of one form JAX traces it
        once for all of them, since they call one jitted function.
        """
        run = functools.partial(run_forward, self.model, self.loss_fn, train=True)
        return jax.jit(run, inline=True)


def _is_multi_steps(optimizer: Any) -> bool:
    """Whether `optax.MultiSteps` is anywhere in it; its state tells."""
    params = {"w": jax.ShapeDtypeStruct((1, 1), np.float32)}
    states = jax.tree.leaves(jax.eval_shape(optimizer.init, params), is_leaf=_is_multi_steps_state)
    return any(map(_is_multi_steps_state, states))


def _is_multi_steps_state(state: Any) -> bool:
    return isinstance(state, optax.MultiStepsState)
