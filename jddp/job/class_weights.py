"""Class weights: rare classes count as much as frequent ones, or as much as a config gives.

The loss of each example is multiplied by the weight of its class, and the mean is divided by the
sum of the weights, over all replicas, as in `torch.nn.CrossEntropyLoss(weight=...)`. Metrics are
not weighted.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from jddp.errors import DataError
from jddp.modules.metrics import Mean
from jddp.typing import LossFn
from jddp.zoo.losses import ArrayBatch, Model


def balanced_weights(labels: np.ndarray, num_classes: int = 0) -> list[float]:
    """The weights with which each class has the same sum of weights: n / (num_classes * n_class).

    Args:
      labels: Labels of the training examples, whole numbers `(n,)`.
      num_classes: Number of classes; 0 for the largest label and one.

    Raises:
      DataError: If a class has no example.
    """
    counts = np.bincount(labels, minlength=num_classes)
    if not counts.all():
        raise DataError(
            f"loss.class_weights=balanced: class {int(counts.argmin())} has no training example. "
            "Give a list of weights."
        )
    return (len(labels) / (len(counts) * counts)).tolist()


def weighted(loss_fn: LossFn, class_weights: Sequence[float]) -> LossFn:
    """A loss of `batch["label"]` whose examples weigh as much as their classes."""

    def weighted_loss(
        model: Model, batch: ArrayBatch, train: bool
    ) -> tuple[Mean, dict[str, Array]]:
        losses, metrics = loss_fn(model, batch, train)
        # A label without a weight gives NaN.
        weights = jnp.take(jnp.asarray(class_weights, losses.dtype), batch["label"], mode="fill")
        return Mean(losses * weights, weights), metrics

    return weighted_loss
