"""State that a step overwrites with its gradient, as fp8 layers keep their scales.

A layer of Flax such as `nn.Fp8DirectDotGeneralOp` returns, in the place of the gradient of its
collection `_overwrite_with_gradient`, the next values of the collection: scales, and a history of
the largest absolute values. Of several micro-batches and replicas the maximum of each entry is
taken, which is the value that one device finds in the whole batch.

    values = select(model, model_state)                 # by path; {} for most models
    model_state = put(model_state, values)
"""

import jax
from jax import lax
from jax.flatten_util import ravel_pytree

from jddp.modules.functional import FlaxModel
from jddp.typing import ModelState, PyTree


def select(model: FlaxModel, model_state: ModelState, *, only_shared: bool = False) -> PyTree:
    """The leaves that a step overwrites, by their paths.

    Args:
      model: The model.
      model_state: Other state of the model.
      only_shared: Whether to leave out per-replica state.
    """
    return {
        jax.tree_util.keystr(path): x
        for path, x in jax.tree_util.tree_leaves_with_path(model_state)
        if model.is_overwritten(path) and not (only_shared and model.keeps_own(path, x))
    }


def put(model_state: ModelState, values: PyTree) -> ModelState:
    """The state with these values in place of the old ones, by path."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: values.get(jax.tree_util.keystr(path), x), model_state
    )


def largest_of_rows(model: FlaxModel, model_state: ModelState) -> ModelState:
    """The state with one row, the largest, of values that have a row for each logical shard."""
    values = select(model, model_state, only_shared=True)
    return put(model_state, {path: x.max(0, keepdims=True) for path, x in values.items()})


def largest_of_replicas(model: FlaxModel, model_state: ModelState, axis: str) -> ModelState:
    """The state with the largest values of all replicas; one all-reduce."""
    if not (values := select(model, model_state, only_shared=True)):
        return model_state
    # One vector: these are small arrays of many layers, each of which would cost a latency.
    numbers, restore = ravel_pytree(values)
    return put(model_state, restore(lax.pmax(numbers, axis)))
