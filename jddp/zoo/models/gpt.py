"""A decoder-only language model like GPT-2: for bytes by default, or for any tokens.

References:
  Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. Its smallest model is
  `gpt2()`. Attention weights are not dropped here, embeddings and branch outputs are.
  Press and Wolf, "Using the Output Embedding to Improve Language Models", EACL 2017: one matrix
  both embeds the tokens and scores them. https://arxiv.org/abs/1608.05859
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jaxtyping import Float, Int

from jddp.ground.errors import ConfigError, check_choice
from jddp.zoo.models.transformer import Transformer


@jax.custom_vjp
def gather_rows(table: Float[Array, "vocab width"], tokens: Int[Array, "b t"]) -> Array:
    """The rows of the tokens; their gradient is a product with one-hot rows instead of a scatter.

    The backward pass costs 2 * tokens * vocab * width operations, and one-hot rows of
    tokens * vocab entries where XLA does not fuse them.
    """
    return table[tokens]


def _table_gradient(kept: tuple[Array, Array], rows: Float[Array, "b t width"]) -> Any:
    table, tokens = kept
    is_token = jax.nn.one_hot(tokens, len(table), dtype=rows.dtype)
    return jnp.einsum("btv,btw->vw", is_token, rows), None


gather_rows.defvjp(lambda table, tokens: (table[tokens], (table, tokens)), _table_gradient)
GATHERS: dict[str, Callable[[Array, Array], Array]] = {
    "scatter": lambda table, tokens: table[tokens],
    "one_hot": gather_rows,
}


def positions_in(segments: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """The position of each token in its segment, from 0 on; equal neighbours are one segment."""
    places = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    is_first = jnp.diff(segments, axis=1, prepend=segments[:, :1]) != 0
    return places - jax.lax.cummax(jnp.where(is_first, places, 0), axis=1)


class GPT(Transformer):
    """Token embeddings and learned positions through a stack of causal blocks.

    Attributes:
      vocab_size: Number of different tokens; 256 for bytes.
      max_length: Tokens of the longest sequence.
      embedding_gradient: How the gradient of the embeddings is added up: by a "scatter", or by a
        product with "one_hot" rows. The product is the same each time, on GPUs too.
    """

    vocab_size: int = 256
    max_length: int = 256
    norm_epsilon: float = 1e-5
    embedding_gradient: str = "scatter"

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "b t"],
        train: bool = False,
        segments: Int[Array, "b t"] | None = None,
    ) -> Float[Array, "b t vocab"]:
        """The logits of the token that follows each position, in float32.

        Args:
          tokens: Tokens of each row.
          train: Whether this is training.
          segments: Number of each token's document in its row, where rows are packed. Each document
            has the same logits as alone in a row. None for one document in each row.
        """
        t = tokens.shape[1]
        if t > self.max_length:
            raise ConfigError(
                f"sequences of {t} tokens are longer than max_length {self.max_length}. Raise "
                "max_length, or shorten the sequences."
            )
        check_choice("embedding_gradient", self.embedding_gradient, GATHERS)
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(self.vocab_size, self.width, embedding_init=init)
        positions = self.param("positions", init, (self.max_length, self.width))
        # The cast follows the gather: the gradient, a sum over tokens, is in the table's dtype.
        table, gather = embed.embedding, GATHERS[self.embedding_gradient]
        x = gather(table.astype("float32"), tokens)
        if segments is None:
            x = x + positions[None, :t]
        else:
            x = x + gather(positions, positions_in(segments))
        x = x.astype(self.dtype or table.dtype)
        # The residual stream sums two branches per block: GPT-2 scales their last layers down.
        inits = {"kernel_init": init}
        inits["output_init"] = nn.initializers.normal(0.02 / (2 * self.num_layers) ** 0.5)
        x = self.apply_blocks(x, train=train, is_causal=True, segments=segments, **inits)
        return jnp.dot(x, table.T.astype(x.dtype)).astype("float32")


gpt2 = partial(GPT, vocab_size=50257, num_layers=12, num_heads=12, width=768, max_length=1024)
