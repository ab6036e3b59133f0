"""A decoder-only language model, as GPT-2: for bytes by default, or for any tokens.

References:
  Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. Its smallest model is
  `GPT(vocab_size=50257, num_layers=12, num_heads=12, width=768, max_length=1024)`. Attention
  weights are not dropped here, embeddings and branch outputs are.
  Press and Wolf, "Using the Output Embedding to Improve Language Models", EACL 2017: one matrix
  both embeds the tokens and scores them. https://arxiv.org/abs/1608.05859
"""

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jaxtyping import Float, Int

from jddp.errors import ConfigError
from jddp.zoo.models.transformer import Transformer


class GPT(Transformer):
    """Token embeddings and learned positions through a stack of causal blocks.

    Attributes:
      vocab_size: Number of different tokens; 256 for bytes.
      max_length: Tokens of the longest sequence.
    """

    vocab_size: int = 256
    max_length: int = 256

    @nn.compact
    def __call__(self, tokens: Int[Array, "b t"], train: bool = False) -> Float[Array, "b t vocab"]:
        """The logits of the token that follows each position, in float32."""
        t = tokens.shape[1]
        if t > self.max_length:
            raise ConfigError(
                f"sequences of {t} tokens are longer than max_length {self.max_length}. Raise "
                "max_length, or shorten the sequences."
            )
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(self.vocab_size, self.width, embedding_init=init)
        positions = self.param("positions", init, (self.max_length, self.width))
        # Cast after the gather: its gradient, a sum over tokens, is in the dtype of the table.
        x = embed(tokens) + positions[None, :t]
        x = x.astype(self.dtype or x.dtype)
        # Two branches a block add up in the residual stream: GPT-2 scales their ends for it.
        inits = {"kernel_init": init}
        inits["output_init"] = nn.initializers.normal(0.02 / (2 * self.num_layers) ** 0.5)
        x = self.apply_blocks(x, train=train, is_causal=True, **inits)
        return jnp.dot(x, embed.embedding.T.astype(x.dtype)).astype("float32")
