"""What a step is made of, and the rules that the parts keep."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jddp.engine.guard import NoGuard, choose_guard
from jddp.engine.state import is_float
from jddp.engine.sync import LocalSteps
from jddp.engine.view import ClipByGlobalNorm, NoClip, Own, Shard, View
from jddp.errors import ConfigError
from jddp.modules.forward import run_and_settle
from jddp.modules.functional import FlaxModel
from jddp.reduce import Reduction
from jddp.typing import Batch, LossFn, PyTree

UNUSED_PARAMETERS = ("zero", "skip", "error")
# Pairs of options that cannot be combined, and why.
REFUSED = {
    ("logical_replicas", "shard_optimizer"): "an update of a shard is computed in other vectors",
    ("logical_replicas", "local_steps"): "bits do not depend on replicas; each goes its own way",
    ("local_steps", "shard_optimizer"): "each replica updates all of its own parameters",
    ("local_steps", "comm_hook"): "a hook reduces gradients in each step; see wire_dtype",
}


class Inputs(NamedTuple):
    """What a step is given beside the state.

    Attributes:
      rows: The batch, split over the replicas.
      constants: What the loss is handed as `constants`, on every replica; None for nothing.
    """

    rows: Batch
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

    @property
    def axis(self) -> str:
        """Name of the axis of the replicas."""
        return self.reduction.axis

    def __post_init__(self) -> None:
        """Holds each part to its rule."""
        if not (hasattr(self.optimizer, "init") and hasattr(self.optimizer, "update")):
            raise ConfigError(
                f"optimizer is of type {type(self.optimizer).__name__}. Give an optax optimizer: "
                "optax.adam(1e-3), not optax.adam; of an nnx.Optimizer its .tx."
            )
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
        _ = self.guard  # Refuses a loss scale that is none.
        if self.accumulate_steps > 1 and _is_multi_steps(self.optimizer):
            raise ConfigError(
                "optax.MultiSteps beside accumulate_steps would reduce once per part and count "
                "steps twice. Drop optax.MultiSteps: accumulate_steps reduces once for all parts."
            )
        given = vars(self) | {"logical_replicas": self.num_shards}
        given |= {"comm_hook": self.reduction.hook_name}
        for pair, why in REFUSED.items():
            if all(given[name] for name in pair):
                raise ConfigError(f"{' and '.join(pair)} cannot be combined: {why}. Leave one out.")

    def keeps_own(self, path: Any, x: Any) -> bool:
        """Whether each replica has its own of a leaf of parameters or the optimizer's state."""
        return self.local_steps is not None and is_float(x)

    @functools.cached_property
    def view(self) -> View:
        """What one replica holds of the mean gradient. It follows from other parts."""
        chosen = Own if self.local_steps else Shard if self.reduction.keeps_parts else View
        return chosen(self.axis)

    @functools.cached_property
    def clip(self) -> NoClip:
        """Clipping of the mean gradient."""
        return NoClip() if self.max_grad_norm is None else ClipByGlobalNorm(self.max_grad_norm)

    @functools.cached_property
    def guard(self) -> NoGuard:
        """Which steps count, and the loss scale."""
        return choose_guard(self.loss_scale, self.skip_nonfinite, self.model.keeps_own)

    @functools.cached_property
    def forward(self) -> Any:
        """`forward(params, model_state, rows, key, constants)`: the loss in training.

        The plan, the step and each of its parts run the model; for rows of one form JAX traces it
        once for all of them, since they call one jitted function.
        """
        run = functools.partial(run_and_settle, self.model, self.loss_fn)
        return jax.jit(run, inline=True)


def _is_multi_steps(optimizer: Any) -> bool:
    """Whether `optax.MultiSteps` is anywhere in it; its state tells."""
    params = {"w": jax.ShapeDtypeStruct((1, 1), np.float32)}
    states = jax.tree.leaves(jax.eval_shape(optimizer.init, params), is_leaf=_is_multi_steps_state)
    return any(map(_is_multi_steps_state, states))


def _is_multi_steps_state(state: Any) -> bool:
    return isinstance(state, optax.MultiStepsState)
