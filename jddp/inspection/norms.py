"""Norms of the parameters and gradients of each layer, to find the first overflow."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jddp.engine.state import TrainState
from jddp.engine.trainable import Trainable
from jddp.typing import Batch

Layers = dict[str, dict[str, float]]


def diagnose(ddp: Trainable, state: TrainState, batch: Batch) -> Layers:
    """Measures the parameters and gradients of the next step, layer by layer; changes nothing.

    Args:
      ddp: A `jddp.DataParallel`.
      state: State from `init` or `step`.
      batch: This process's rows.

    Returns:
      For each parameter, by its path: "parameter" and "gradient", the norms of the parameter and of
      its averaged gradient, and "not_finite", the number of non-finite values in the gradient.
    """
    ddp.check(state)
    params, _ = ddp.steps.merged((state.params, state.model_state))
    grads, _ = ddp.gradients(state, batch)
    measured = jax.device_get(jax.jit(jax.tree.map, static_argnums=0)(_measure, params, grads))
    layers: Layers = {}
    for path, value in jax.tree_util.tree_leaves_with_path(measured):
        name, _, norm = jax.tree_util.keystr(path, simple=True, separator="/").rpartition("/")
        layers.setdefault(name, {})[norm] = float(value)
    return layers


def _measure(param: Array, grad: Array) -> dict[str, Float[Array, ""]]:
    return {
        "parameter": jnp.linalg.norm(jnp.abs(param).astype(jnp.float32)),
        "gradient": jnp.linalg.norm(jnp.abs(grad).astype(jnp.float32)),
        "not_finite": (~jnp.isfinite(grad)).sum(dtype=jnp.float32),
    }
