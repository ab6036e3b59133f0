"""Attention whose weights are not kept for the backward pass, but computed again in tiles.

The weights of a layer are `(b, heads, t, t)`: for 8 x 1,024 tokens and the sizes of GPT-2 they need
more memory than all other values of a step. Here the weights of one tile of queries are there at a
time; where attention is causal, the tile leaves out the keys that come after its queries. Logits
are rounded to the dtype of the queries, as by PyTorch's autocast; the softmax is computed in
float32 at least.
"""

import jax
import jax.numpy as jnp
from jax import Array

TILE_SIZE = 512  # Queries; with fewer an H100 spends more time on slices than it saves on keys.


def attend_in_tiles(
    query: Array, key: Array, value: Array, mask: Array | None = None, *, is_causal: bool
) -> Array:
    """Computes what `jax.nn.dot_product_attention` computes, up to rounding.

    Args:
      query: Queries `(b, t, heads, size)`.
      key: Keys `(b, s, heads, size)`.
      value: Values `(b, s, heads, size)`.
      mask: Array `(b or 1, heads or 1, t, s)`, True where a query sees a key; None for all.
      is_causal: Whether a query sees only its own position and earlier ones.
    """
    num_queries, num_keys = query.shape[1], key.shape[1]
    size = TILE_SIZE if is_causal else num_queries
    sees = jnp.tri(num_queries, num_keys, dtype=bool) | (not is_causal)
    sees = sees[None, None] if mask is None else sees[None, None] & mask
    outputs = []
    for start in range(0, num_queries, size):
        rows = slice(start, start + size)
        columns = slice(start + size if is_causal else num_keys)
        tile = query[:, rows], key[:, columns], value[:, columns], sees[..., rows, columns]
        outputs.append(jax.checkpoint(_attend)(*tile))
    return jnp.concatenate(outputs, axis=1)


def _attend(query: Array, key: Array, value: Array, sees: Array) -> Array:
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    logits = jnp.where(sees, logits.astype(wide) * query.shape[-1] ** -0.5, jnp.finfo(wide).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits).astype(value.dtype), value)
