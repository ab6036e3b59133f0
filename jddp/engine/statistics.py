"""Running statistics of the global batch, moved once a step however many micro-batches it has.

A batch norm moves its running statistics each time it runs: k micro-batches, one after the other,
would move them by 1 - momentum ** k. So each micro-batch runs from the statistics before the step,
and the step keeps the mean of the k new values, which is a single move towards the mean of the
statistics of the micro-batches. Where there is a mask, micro-batches are weighted by their valid
entries of all replicas.

    running = running_statistics(model, model_state, rows, num)
    carried = running.start(model_state)
    carried = running.add(carried, i, after)       # after a run from running.before(carried)
    model_state = running.finish(carried)

Other state passes from one micro-batch to the next.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jddp.modules.base import FlaxModel
from jddp.modules.metrics import mask_in
from jddp.typing import Batch, ModelState, PyTree


@dataclass(frozen=True)
class RunningStatistics:
    """The running statistics among a model's other state, over the micro-batches of a step.

    Attributes:
      first: State before the step.
      chosen: Tree of booleans, of the structure of `first`: the leaves that are moved once.
      weights: Weights of the micro-batches, which add up to 1.
    """

    first: ModelState
    chosen: PyTree
    weights: Array | tuple[float, ...]

    def start(self) -> ModelState:
        """Returns the state to carry over the micro-batches; of chosen leaves, their moves."""
        return self._map(lambda first, _: jnp.zeros_like(first, _exact(first)), self.first)

    def before(self, carried: ModelState) -> ModelState:
        """Returns the state from which the next micro-batch runs."""
        return self._map(lambda first, _: first, carried)

    def add(self, carried: ModelState, i: int | Array, after: ModelState) -> ModelState:
        """Returns the state to carry on, with the state after micro-batch `i`."""

        def add(first: Array, total: Array, x: Array, is_chosen: bool) -> Array:
            if not is_chosen:
                return x
            # Moves are added, and not values: a leaf that no micro-batch moves stays as it is.
            move = x.astype(total.dtype) - first.astype(total.dtype)
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return move  # A count of updates: each micro-batch has counted this one.
            return total + jnp.asarray(self.weights, total.real.dtype)[i] * move

        return jax.tree.map(add, self.first, carried, after, self.chosen)

    def finish(self, carried: ModelState) -> ModelState:
        """Returns the state after the last micro-batch."""

        def move(first: Array, total: Array) -> Array:
            return (first.astype(total.dtype) + total).astype(first.dtype)

        return self._map(move, carried)

    def _map(self, function: Callable[[Array, Array], Array], state: ModelState) -> ModelState:
        """Applies a function of the first value and this one to the chosen leaves."""
        return jax.tree.map(
            lambda first, x, is_it: function(first, x) if is_it else x,
            self.first,
            state,
            self.chosen,
        )


def running_statistics(
    model: FlaxModel, model_state: ModelState, rows: Batch, num: int
) -> RunningStatistics:
    """Chooses the statistics that are moved once, and weighs the micro-batches.

    Args:
      model: The model.
      model_state: Other state of the model before the step.
      rows: Rows of one replica.
      num: Number of micro-batches. A single one moves everything by itself.
    """
    chosen = jax.tree_util.tree_map_with_path(
        lambda path, x: num > 1 and model.is_global_statistic(path, x), model_state
    )
    equal = (1 / num,) * num
    mask, sync = mask_in(rows), model.sync
    # Logical replicas have no batch norm of the global batch: it would take a collective.
    if mask is None or sync.logical_replicas or not any(jax.tree.leaves(chosen)):
        return RunningStatistics(model_state, chosen, equal)
    valid = (mask.astype(jnp.float32) > 0).reshape(num, -1).astype(jnp.float32).sum(1)
    # Of all replicas, or their statistics would differ.
    valid = lax.psum(valid, sync.axis)
    weights = jnp.where(valid.sum() > 0, valid / jnp.maximum(valid.sum(), 1), jnp.asarray(equal))
    return RunningStatistics(model_state, chosen, weights)


def _exact(x: Array) -> np.dtype:
    is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.promote_types(x.dtype, jnp.float32) if is_inexact else x.dtype
