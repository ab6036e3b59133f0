"""The layers of a model: norms of their parameters and gradients, and the number of outputs."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jddp.engine.compiled import Trainable
from jddp.engine.evaluation import make_predict
from jddp.engine.state import Inputs, TrainState
from jddp.ground.typing import Batch
from jddp.modules.base import outputs

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


def num_outputs(ddp: Trainable, batch: Batch) -> int | None:
    """Size of the last dim of the model's outputs; None if it cannot be known.

    Args:
      ddp: A `jddp.DataParallel`.
      batch: This process's rows, or their `jax.ShapeDtypeStruct`s, with "image", "tokens" or "x".
    """
    num = ddp.mesh.size
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num, *x.shape[1:]), x.dtype), batch)
    try:
        state = ddp.steps.abstract_state(batch)
        values = jax.eval_shape(ddp.steps.merged, (state.params, state.model_state))
        given = state.key, values, np.uint32(0), Inputs(rows, None), np.ones(num, "float32")
        shapes = jax.eval_shape(make_predict(ddp.steps.spec, ddp.mesh, outputs), *given)
        (found,) = jax.tree.leaves(shapes)
        return int(found.shape[1:][-1])
    # The model has other inputs or outputs, or needs a mode of its own: a step will report it.
    except Exception:
        return None
