"""Weights of documents: tokens of a document count as much in training as the document.

The mean is divided by the sum of the weights of all predicted tokens, over all replicas. Metrics
and evaluations count every token once.
"""

from jddp.modules.metrics import Mean
from jddp.typing import LossFn
from jddp.zoo.losses import ArrayBatch, Model


def weighted_by_documents(loss_fn: LossFn) -> LossFn:
    """A loss of tokens whose losses weigh as much as `batch["weight"]`, `(b, t)`, in training."""

    def weighted_loss(model: Model, batch: ArrayBatch, train: bool) -> object:
        losses, metrics = loss_fn(model, batch, train)
        return (Mean(losses * batch["weight"], batch["weight"]) if train else losses), metrics

    return weighted_loss
