"""Losses by name: one number per example or per token, not averaged.

    losses, metrics = cross_entropy(model, batch, train)

A loss gets a model ready to be called (a bound Linen module, or an NNX module already in the right
mode), the batch of this replica, and whether this is training. It returns `losses`, whose
leading dim is the examples, alone or with a dict of metrics of the same kind. It averages nothing:
the step does, over all replicas.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Float, Int

from jddp.ground.errors import ConfigError
from jddp.ground.typing import LossFn
from jddp.modules.base import ArrayBatch, Model, call_model
from jddp.modules.metrics import Mean, Metric
from jddp.zoo.tiles import TILE_SIZE, cross_entropies, tiled_cross_entropy


def cross_entropy(
    model: Model,
    batch: ArrayBatch,
    train: bool,
    *,
    label_smoothing: float = 0.0,
    class_weights: Sequence[float] | None = None,
) -> tuple[Float[Array, "b"] | Mean, dict[str, Array]]:
    """The softmax cross entropy of `batch["image"]` and `batch["label"]`, in nats, and "accuracy".

    The loss of a label that is no class, or has no weight, is NaN.

    Args:
      model: Model that returns logits `(b, classes)`.
      batch: Rows of "image" or "x", and of "label", whole numbers `(b,)`; "mask" `(b,)`, if there
        is padding.
      train: Whether this is training.
      label_smoothing: Fraction of the target that is spread over all classes, in training.
      class_weights: Weight of each class in the target; the mean is divided by the sum of the
        weights, as in `torch.nn.CrossEntropyLoss(weight=...)`. None for equal weights.

    References:
      Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", CVPR 2016,
      section 7. https://arxiv.org/abs/1512.00567
    """
    inputs, labels = _fields(batch, "cross_entropy", "x" if "x" in batch else "image", "label")
    logits = call_model(model, inputs, train, batch.get("mask"))
    if logits.ndim != 2:
        raise ConfigError(f"cross_entropy: the model gives {logits.shape}. They need (b, classes).")
    metrics = {"accuracy": logits.argmax(-1) == labels}
    smoothing = label_smoothing if train else 0.0
    losses = _cross_entropy(logits, labels, smoothing, class_weights)
    if class_weights is not None:
        if "other_label" in batch:
            raise ConfigError("class_weights and mixed labels cannot be combined.")
        return Mean(losses, jnp.asarray(class_weights, logits.dtype)[labels]), metrics
    if "other_label" in batch:  # A transform has mixed pairs of examples.
        share = batch["share"]
        others = _cross_entropy(logits, batch["other_label"], smoothing)
        losses = jnp.where(share < 1, share * losses + (1 - share) * others, losses)
    return losses, metrics


def _cross_entropy(
    logits: Float[Array, "b outputs"],
    labels: Int[Array, "b"],
    smoothing: float,
    weights: Sequence[float] | None = None,
) -> Float[Array, "b"]:
    size = logits.shape[-1]
    if smoothing or weights is not None:
        targets = optax.smooth_labels(jax.nn.one_hot(labels, size, dtype=logits.dtype), smoothing)
        if weights is not None:  # An output without a weight is no class.
            targets *= jnp.array([*weights, *[0.0] * size][:size], logits.dtype)[None]
        losses = optax.softmax_cross_entropy(logits, targets)
    else:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    num_classes = size if weights is None else min(size, len(weights))
    # Negative labels would count from the last class.
    return jnp.where((labels >= 0) & (labels < num_classes), losses, jnp.nan)


def next_token(
    model: Model,
    batch: ArrayBatch,
    train: bool,
    *,
    bytes_per_token: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    tile_size: int | None = TILE_SIZE,
) -> tuple[Float[Array, "b t"] | Mean, dict[str, Array | Metric]]:
    """The cross entropy of each token, given the tokens before it, and "accuracy".

    An evaluation also has "perplexity", `exp(nats / count)`, and where the bytes are known
    "bits_per_byte", `nats / ln(2) / (count * bytes_per_token)`. Here `nats` is the sum of the
    losses of all valid predictions, and `count` is their number: both metrics are computed once,
    from these sums, and are no means over batches. Tokenizers can be compared by bits per byte.

    Args:
      model: Causal model that returns logits `(b, t, vocab)` for tokens `(b, t)`; or, if its
        `__call__` has an argument `loss_head`, `loss_head(hidden, table)`. Then all logits are
        never in memory (`jddp.zoo.tiles`).
      batch: Rows of "tokens" `(b, t + 1)`; "mask" `(b, t)`, if some are not predicted; and
        "segments" `(b, t)`, if documents are packed.
      train: Whether this is training.
      bytes_per_token: Mean number of bytes of text that a token stands for. The data of a job fill
        in the mean over their test split. So bits per byte are exact for an evaluation of the
        whole split; for a part of it they use the same mean.
      label_smoothing: Fraction of the target that is spread over the vocabulary, in training.
      z_loss: Weight of the square of the log of the softmax's denominator, in training; 1e-4 is
        usual.
      tile_size: Number of tokens whose logits are in memory at a time, with a `loss_head`; None for
        all, as `jddp.LogicalReplicas` needs.

    Returns:
      Losses in nats, and metrics, of each of the `t` predictions; in training with a `loss_head`
      the sum of the losses. The loss of a token that is not in the vocabulary is NaN.

    References:
      Gao et al., "The Pile", 2020, section 3.1: bits per byte. https://arxiv.org/abs/2101.00027
    """
    (tokens,) = _fields(batch, "next_token", "tokens")
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    head = None
    if tile_size is not None and "loss_head" in inspect.signature(model).parameters:
        head = partial(tiled_cross_entropy, labels=targets, mask=batch.get("mask"), train=train)
        head = partial(head, label_smoothing=label_smoothing, z_loss=z_loss, tile_size=tile_size)
    found = call_model(model, inputs, train, segments=batch.get("segments"), loss_head=head)
    if head is None:
        found = cross_entropies(found, targets, *((label_smoothing, z_loss) if train else ()))
    losses, is_hit = found
    metrics = {"accuracy": is_hit, "perplexity": Metric(losses, _perplexity)}
    if bytes_per_token is not None:
        metrics["bits_per_byte"] = Metric(losses, _bits_per_byte(bytes_per_token))
    return losses, metrics


def _perplexity(nats: float, count: float) -> float:
    with np.errstate(over="ignore"):  # A run that diverges overflows.
        return np.exp(nats / count)


@cache  # Each trace needs the same function: it is static in a program.
def _bits_per_byte(bytes_per_token: float) -> Callable[[float, float], float]:
    if not bytes_per_token > 0:
        raise ConfigError(f"bytes_per_token {bytes_per_token} is not positive. Leave it out.")
    return lambda nats, count: nats / math.log(2) / (count * bytes_per_token)


def mean_squared_error(model: Model, batch: ArrayBatch, train: bool) -> Float[Array, "b"]:
    """The squared error of the model at `batch["x"]`, averaged over the outputs of each example.

    Args:
      model: Model that returns predictions of the shape of "y" for "x".
      batch: Rows of "x" and "y".
      train: Whether this is training.
    """
    x, y = _fields(batch, "mean_squared_error", "x", "y")
    predictions = call_model(model, x, train)
    if predictions.shape != y.shape:
        raise ConfigError(
            f"mean_squared_error: the model gives {predictions.shape} for targets of {y.shape}. "
            "The two shapes must be the same."
        )
    return jnp.square(predictions - y).reshape(len(y), -1).mean(axis=1)


_LOSSES: tuple[Any, ...] = (cross_entropy, mean_squared_error, next_token)
LOSSES: dict[str, LossFn] = {loss.__name__: loss for loss in _LOSSES}


def _fields(batch: ArrayBatch, loss: str, *names: str) -> list[Array]:
    if missing := [name for name in names if name not in batch]:
        raise ConfigError(
            f"loss {loss!r} reads {', '.join(names)}, and the batch holds {', '.join(batch)}: "
            f"{missing[0]!r} is missing. Choose another loss or other data."
        )
    return [batch[name] for name in names]
