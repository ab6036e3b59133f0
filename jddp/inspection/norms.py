"""Norms of parameters and gradients of each layer, to find where numbers overflow first."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jddp.typing import Grads, Params

Layers = dict[str, dict[str, float]]


def diagnose(params: Params, grads: Grads) -> Layers:
    """Measures averaged gradients beside the parameters.

    Returns:
      For each parameter, by its path: "parameter" and "gradient", which are norms, and
      "not_finite", how many numbers of the gradient are not.
    """
    measured = jax.device_get(jax.jit(jax.tree.map, static_argnums=0)(_measure, params, grads))
    layers: Layers = {}
    for path, value in jax.tree_util.tree_leaves_with_path(measured):
        *names, what = (jax.tree_util.keystr((key,), simple=True) for key in path)
        layers.setdefault("/".join(names), {})[what] = float(value)
    return layers


def _measure(param: Array, grad: Array) -> dict[str, Float[Array, ""]]:
    return {
        "parameter": jnp.linalg.norm(jnp.abs(param).astype(jnp.float32)),
        "gradient": jnp.linalg.norm(jnp.abs(grad).astype(jnp.float32)),
        "not_finite": (~jnp.isfinite(grad)).sum(dtype=jnp.float32),
    }
