"""The number of outputs of a model, to compare with the classes or vocabulary of the data."""

import jax
import numpy as np

from jddp.engine.evaluation import make_predict
from jddp.engine.state import Inputs
from jddp.engine.trainable import Trainable
from jddp.typing import Batch
from jddp.zoo.losses import outputs


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
