"""Attention by cuDNN's kernel where it applies, or else by XLA.

    layer = nn.MultiHeadDotProductAttention(num_heads=12, attention_fn=Attention())

The weights of a layer are `(b, heads, t, t)`: for 8 x 1,024 tokens and the sizes of GPT-2 they need
more memory than all other values of a step. cuDNN's kernel never writes them. XLA keeps them for
the backward pass, or computes them again in tiles: then the weights of one tile of queries are
there at a time, and where attention is causal, the tile leaves out the keys that come after its
queries. In tiles logits are rounded to the dtype of the queries, as by PyTorch's autocast; the
softmax is computed in float32 at least.
"""

import logging
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jddp.ground.errors import ConfigError, check_choice

TILE_SIZE = 512  # Queries; with fewer an H100 spends more time on slices than it saves on keys.


@dataclass(frozen=True)
class Attention:
    """A function of queries, keys and values for `attention_fn=` of Flax's layers.

    These are Linen's `MultiHeadDotProductAttention` and NNX's `MultiHeadAttention`. Python's
    logger "jddp" names the implementation at level INFO, once for each.

    Attributes:
      implementation: "cudnn", "xla", or "auto": cuDNN's on NVIDIA GPUs if its kernel can compute
        this (16 bits, sizes of heads, kinds of masks), and XLA's elsewhere.
      in_tiles: Whether XLA's weights are computed again in tiles, and not kept.
    """

    implementation: str = "auto"
    in_tiles: bool = True

    def __call__(
        self,
        query: Float[Array, "b t heads size"],
        key: Float[Array, "b s heads size"],
        value: Float[Array, "b s heads size"],
        mask: Array | None = None,
        is_causal: bool = False,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        **others: object,
    ) -> Float[Array, "b t heads size"]:
        """Computes the values, weighted; equal to Flax's own function up to rounding.

        Args:
          query: Queries.
          key: Keys.
          value: Values.
          mask: Array `(b or 1, heads or 1, t, s)`, nonzero where a query sees a key.
          is_causal: Whether a query sees only its own position and earlier ones.
          dropout_rate: Fraction of the weights that are zeroed unless `deterministic`: 0.
          deterministic: Whether no weight is zeroed.
          **others: Other arguments of Flax's layers; no `bias`, and no `module` to sow weights in.

        Raises:
          ConfigError: If the implementation is unknown, or cannot compute this; or if weights are
            to be zeroed, biased or sown: they are not in memory.
        """
        check_choice("attention", self.implementation, ("auto", "cudnn", "xla"))
        is_dropping = dropout_rate > 0 and not deterministic
        if is_dropping or any(others.get(name) is not None for name in ("bias", "module")):
            raise ConfigError(
                "attention_fn=Attention() has no weights in memory, which dropout_rate, bias and "
                "sow_weights need. Leave them out, or leave attention_fn out."
            )
        mask = None if mask is None else mask.astype(bool)
        by_jax = partial(jax.nn.dot_product_attention, mask=mask, is_causal=is_causal)
        by_cudnn = partial(by_jax, implementation="cudnn")
        is_xla = self.implementation == "xla"
        reason = "chosen" if is_xla else _reason_against(by_cudnn, query, key, value)
        if reason and self.implementation == "cudnn":
            raise ConfigError(f"attention='cudnn': {reason}. Choose 'auto' or 'xla'.")
        _report(f"xla: {reason}" if reason else "cudnn")
        if not reason:
            return by_cudnn(query, key, value)
        if self.in_tiles:
            return _in_tiles(query, key, value, mask, is_causal)
        return by_jax(query, key, value, implementation="xla")


def _reason_against(by_cudnn: partial[Array], *arrays: Array) -> str:
    """Returns why cuDNN cannot compute this, by what JAX checks in a trace; "" if it can."""
    if jax.default_backend() != "gpu":
        return "this process computes on no GPU"
    try:
        jax.eval_shape(lambda *x: jax.vjp(by_cudnn, *x)[1](x[0]), *arrays)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return str(error).rstrip(".")
    return ""


@cache  # A line for each choice, and not for each layer and trace.
def _report(choice: str) -> None:
    logging.getLogger("jddp").info("attention %s", choice)


def _in_tiles(query: Array, key: Array, value: Array, mask: Array | None, is_causal: bool) -> Array:
    t, s = query.shape[1], key.shape[1]
    size = TILE_SIZE if is_causal else t
    sees = (jnp.tri(t, s, dtype=bool)[None, None] | (not is_causal)) & (mask is None or mask)
    outputs = []
    for start in range(0, t, size):
        rows = slice(start, start + size)
        columns = slice(start + size if is_causal else s)
        tile = query[:, rows], key[:, columns], value[:, columns], sees[..., rows, columns]
        outputs.append(jax.checkpoint(_attend)(*tile))
    return jnp.concatenate(outputs, axis=1)


def _attend(query: Array, key: Array, value: Array, sees: Array) -> Array:
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    logits = jnp.where(sees, logits.astype(wide) * query.shape[-1] ** -0.5, jnp.finfo(wide).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits).astype(value.dtype), value)
