"""The softmax cross entropy of hidden states and a table, without an array of all logits.

    def loss_fn(model, batch, train):
        hidden, table = model(batch["tokens"][:, :-1])         # (b, t, width), (vocab, width)
        labels, mask = batch["tokens"][:, 1:], batch.get("mask")
        losses, is_hit = tiled_cross_entropy(hidden, table, labels, mask, train=train)
        return losses, {"accuracy": is_hit}

For 8 x 1,024 tokens and the vocabulary of GPT-2 all logits are 0.8 GB in bfloat16, and the plain
loss also keeps their gradient. Here tokens are run in tiles, and the logits of one tile are there
at a time. In training the gradient of a tile follows its loss at once: no logits are computed
twice, as they are where tiles divide the vocabulary. This needs the loss as one sum, all of whose
entries weigh the same: so it is a `Mean` of sums in training, and one loss per entry in evaluation.

References:
  Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024, section 3.2: the
  gradient in the forward pass, tile by tile. https://arxiv.org/abs/2410.10989
  Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, section 5: the z-loss.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jddp.modules.base import TILED
from jddp.modules.metrics import MaskedMean, Mean

# With fewer tokens, an H100 spends more time on adding a tile's gradient to the table's gradient
# than on the product that makes it.
TILE_SIZE = 2048
ALIGNED = 16  # Products on GPUs need such a vocabulary, or else each tile is padded.
_Options = tuple[float, float, int]  # label_smoothing, z_loss, tile_size


@jax.named_scope(TILED)
def tiled_cross_entropy(
    hidden: Float[Array, "*b width"],
    table: Float[Array, "vocab width"],
    labels: Int[Array, "*b"],
    mask: Array | None = None,
    *,
    train: bool,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    tile_size: int = TILE_SIZE,
) -> tuple[Mean | Float[Array, "*b"], Bool[Array, "*b"]]:
    """The cross entropy of each label in nats, and whether its logit is the highest.

    Both are ready for a loss function to return; in training the losses are one sum. They equal
    `cross_entropies(hidden @ table.T, labels)` up to rounding, and so does the gradient. The
    gradient of the table is summed in float32 at least. The loss of a label that is not in the
    vocabulary is NaN.

    Args:
      hidden: Hidden states, one for each label.
      table: Table of output embeddings; `kernel.T` of a layer with a kernel and no bias.
      labels: The right row of the table for each hidden state.
      mask: Array with 1 where a label counts and 0 where it does not, aligned with the leading dims
        of the labels: `batch.get("mask")`.
      train: Whether to return one sum for training, or else a loss for each label.
      label_smoothing: Fraction of the target that is spread over the vocabulary, in training.
      z_loss: Weight of the square of the log of the softmax's denominator, in training.
      tile_size: Number of labels whose logits are in memory at a time.
    """
    options = label_smoothing, z_loss, tile_size
    widest = jnp.promote_types(hidden.dtype, table.dtype)
    table = table.astype(jnp.promote_types(widest, jnp.float32))
    if not train:
        losses, is_hit = _run(hidden, table, labels, None, (0.0, 0.0, tile_size))
        return losses, is_hit
    weights = jnp.ones(labels.shape, table.dtype)
    if mask is not None:
        dims = tuple(range(mask.ndim, labels.ndim))
        weights *= jnp.expand_dims(mask > 0, dims).astype(table.dtype)
    total, is_hit = _total(hidden, table, labels, weights, options)
    return MaskedMean(total, weights), is_hit


def cross_entropies(
    logits: Float[Array, "*b columns"],
    labels: Int[Array, "*b"],
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
) -> tuple[Float[Array, "*b"], Bool[Array, "*b"]]:
    """The same from all logits at once.

    Args:
      logits: Logits; columns from `vocab_size` on are padding.
      labels: A column for each.
      label_smoothing: As in `tiled_cross_entropy`.
      z_loss: As in `tiled_cross_entropy`.
      vocab_size: Number of columns that count; None for all.
    """
    size, labels = vocab_size or logits.shape[-1], labels.astype(jnp.int32)
    columns = lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    if size < logits.shape[-1]:
        logits = jnp.where(columns < size, logits, -jnp.inf)
    # A masked sum takes the logit of the label: the gradient of an index is a scatter. On GPUs a
    # scatter is deterministic only as a serial loop.
    is_label = columns == jnp.where(labels < size, labels, -1)[..., None]
    of_label = jnp.where(is_label, logits, 0).sum(-1)
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    losses = log_sum - jnp.where(is_label.any(-1), of_label, jnp.nan)
    if label_smoothing:
        mean = jnp.where(columns < size, logits, 0).sum(-1) / size
        losses += label_smoothing * (of_label - mean)
    if z_loss:
        losses += z_loss * log_sum**2
    return losses, logits.argmax(-1).astype(labels.dtype) == labels


def _run(
    hidden: Array, table: Array, labels: Array, weights: Array | None, options: _Options
) -> tuple[Array, ...]:
    """Losses and hits of all labels; with weights, also the gradients of the weighted sum."""
    label_smoothing, z_loss, tile_size = options
    vocab_size = len(table)
    padded = jnp.pad(table.astype(hidden.dtype), ((0, -vocab_size % ALIGNED), (0, 0)))
    size = max(1, min(labels.size, tile_size))

    def in_tiles(x: Array) -> Array:
        x = x.reshape(labels.size, *x.shape[labels.ndim :])
        x = jnp.pad(x, ((0, -len(x) % size), *[(0, 0)] * (x.ndim - 1)))
        return x.reshape(-1, size, *x.shape[1:])

    def joined(x: Array) -> Array:
        return x.reshape(-1, *x.shape[2:])[: labels.size].reshape(*labels.shape, *x.shape[2:])

    def step(table_gradient: Array, tile: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        hidden, labels, *weights = tile

        def of_logits(logits: Array) -> tuple[Array, Array]:
            logits = logits.astype(table.dtype)
            return cross_entropies(logits, labels, label_smoothing, z_loss, vocab_size)

        logits = jnp.dot(hidden, padded.T)
        if not weights:
            return table_gradient, of_logits(logits)
        losses, pullback, is_hit = jax.vjp(of_logits, logits, has_aux=True)
        (gradient,) = pullback(weights[0])
        table_gradient += jnp.dot(gradient.T, hidden, preferred_element_type=table.dtype)
        return table_gradient, (losses, is_hit, jnp.dot(gradient, padded))

    given = (hidden, labels) if weights is None else (hidden, labels, weights)
    start = jnp.zeros(() if weights is None else padded.shape, table.dtype)
    table_gradient, results = lax.scan(step, start, jax.tree.map(in_tiles, given))
    results = jax.tree.map(joined, results)
    return results if weights is None else (*results, table_gradient[:vocab_size])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _total(
    hidden: Array, table: Array, labels: Array, weights: Array, options: _Options
) -> tuple[Array, Array]:
    """The weighted sum of the losses, and the hits; only the sum has a gradient."""
    losses, is_hit = _run(hidden, table, labels, None, options)
    return jnp.where(weights > 0, losses, 0).sum(), is_hit


def _forward(
    hidden: Array, table: Array, labels: Array, weights: Array, options: _Options
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    losses, is_hit, *gradients = _in_one_call(hidden, table, labels, weights, options)
    return (jnp.where(weights > 0, losses, 0).sum(), is_hit), (gradients[0], gradients[1])


def _backward(
    options: _Options, gradients: tuple[Array, Array], given: tuple[Array, Array]
) -> tuple[Array | None, ...]:
    scaled = [(given[0] * x.astype(given[0].dtype)).astype(x.dtype) for x in gradients]
    return (*scaled, None, None)


_total.defvjp(_forward, _backward)
# `jax.checkpoint`, as FSDP uses it, would take all constants out of the loop, in the shape of the
# logits, and leaves such a call alone. Nothing differentiates it.
_in_one_call = jax.custom_vjp(_run, nondiff_argnums=(4,))
_in_one_call.defvjp(_forward, _backward)
