"""A stack of transformer blocks, and the models of it: a language model and a vision transformer.

`GPT` is a decoder-only language model like GPT-2: for bytes by default, or for any tokens.

References:
  Vaswani et al., "Attention Is All You Need", NeurIPS 2017. https://arxiv.org/abs/1706.03762
  Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3: the norm
  stands at the input of each branch. Its smallest model is `gpt2()`. Attention weights are not
  dropped here, embeddings and branch outputs are.
  Press and Wolf, "Using the Output Embedding to Improve Language Models", EACL 2017: one matrix
  both embeds the tokens and scores them. https://arxiv.org/abs/1608.05859
  Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021. https://arxiv.org/abs/2010.11929
  Its base model for patches of 16 pixels, as PyTorch's libraries compute it, is `vit_b16()`.
  Beyer, Zhai and Kolesnikov, "Better plain ViT baselines for ImageNet-1k", 2022: the mean over
  patches stands for the class token. https://arxiv.org/abs/2205.01580
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Initializer
from jax import Array
from jaxtyping import Float, Int

from jddp.ground.errors import ConfigError, check_choice
from jddp.zoo.attention import Attention


class Block(nn.Module):
    """Adds attention, then a two-layer perceptron of four times the width, each of a normed input.

    Attributes:
      num_heads: Heads of the attention, which share the width.
      attend: Function of queries, keys and values, each `(b, t, num_heads, size)`, and a mask.
      dropout_rate: Fraction of each branch's outputs that are zeroed in training.
      train: Whether this is training.
      kernel_init: Initial weights.
      output_init: Initial weights of the two layers that end a branch.
      norm_epsilon: Number added to the variances of the layer norms.
      gelu: Form of the perceptron's GELU: "exact", or its approximation by a "tanh".
      dtype: Dtype of the arithmetic; None follows parameters and inputs.
    """

    num_heads: int
    attend: Callable[..., Array]
    dropout_rate: float
    train: bool
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    output_init: Initializer = nn.initializers.xavier_uniform()
    norm_epsilon: float = 1e-6
    gelu: str = "tanh"
    dtype: jax.typing.DTypeLike | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "b t width"], segments: Int[Array, "b t"] | None = None
    ) -> Float[Array, "b t width"]:
        """The block's output; positions of different segments do not see each other."""
        norm = partial(nn.LayerNorm, self.norm_epsilon, dtype=self.dtype)
        drop = partial(nn.Dropout, self.dropout_rate, deterministic=not self.train)
        x = x + drop()(self._attend(norm(name="norm_1")(x), segments))
        return x + drop()(self._think(norm(name="norm_2")(x)))

    def _attend(self, x: Array, segments: Array | None) -> Array:
        b, t, width = x.shape
        if width % self.num_heads:
            raise ConfigError(f"width {width} does not divide over num_heads {self.num_heads}.")
        mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None]
        x = self._dense(3 * width, self.kernel_init, "query_key_value")(x)
        query, key, value = x.reshape(b, t, 3, self.num_heads, -1).swapaxes(0, 2).swapaxes(1, 2)
        x = self.attend(query, key, value, mask=mask)
        return self._dense(width, self.output_init, "attention_output")(x.reshape(b, t, width))

    def _think(self, x: Array) -> Array:
        width = x.shape[-1]
        check_choice("gelu", self.gelu, ("exact", "tanh"))
        x = self._dense(4 * width, self.kernel_init, "mlp_hidden")(x)
        x = nn.gelu(x, approximate=self.gelu == "tanh")
        return self._dense(width, self.output_init, "mlp_output")(x)

    def _dense(self, width: int, kernel_init: Initializer, name: str) -> nn.Dense:
        return nn.Dense(width, dtype=self.dtype, kernel_init=kernel_init, name=name)


class Transformer(nn.Module):
    """A model with a stack of `Block`s.

    Attributes:
      num_layers: Number of blocks.
      num_heads: Heads of each attention.
      width: Channels of an embedding.
      dropout_rate: Fraction of embeddings and of branch outputs that are zeroed in training.
      remat: Values that the backward pass computes again instead of keeping them: "none"; the
        weights of XLA's "attention", in tiles (`jddp.zoo.attention`): less time and memory on
        GPUs; or all values inside of "blocks", for a third more arithmetic. True means "blocks",
        and False "none".
      scan_layers: Whether to compile one block and loop over it. The parameters of all blocks are
        stacked along a leading dim, and compiling takes as long for a hundred blocks as for one.
      attention: Implementation of the attention: "xla" on any device; "cudnn" in one kernel without
        weights in memory, on NVIDIA GPUs in 16 bits; or "auto": cuDNN's where it applies.
      norm_epsilon: Number added to the variances of the layer norms: 1e-5 in GPT-2, 1e-6 in ViT,
        1e-12 in the ViT of Hugging Face.
      gelu: "tanh", as in GPT-2 and in Google's ViT, or "exact", as in PyTorch's ViTs (see `Block`).
      dtype: Dtype of the arithmetic; None follows parameters and inputs.
    """

    num_layers: int = 4
    num_heads: int = 4
    width: int = 128
    dropout_rate: float = 0.0
    remat: str | bool = "none"
    scan_layers: bool = False
    attention: str = "auto"
    norm_epsilon: float = 1e-6
    gelu: str = "tanh"
    dtype: jax.typing.DTypeLike | None = None

    def apply_blocks(
        self,
        x: Float[Array, "b t width"],
        *,
        train: bool,
        is_causal: bool,
        segments: Int[Array, "b t"] | None = None,
        **inits: Any,
    ) -> Float[Array, "b t width"]:
        """The normed outputs of the blocks; dropout first zeroes some of the embeddings."""
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        remat = {"True": "blocks", "False": "none"}.get(str(self.remat), self.remat)
        check_choice("remat", remat, ("none", "attention", "blocks"))
        attention = Attention(self.attention, in_tiles=remat == "attention")
        attend = partial(attention, is_causal=is_causal)
        # Inside a scan, XLA cannot merge the recomputation with the forward pass.
        block = nn.remat(Block, prevent_cse=not self.scan_layers) if remat == "blocks" else Block
        options = inits | {"gelu": self.gelu, "norm_epsilon": self.norm_epsilon}
        fields = self.num_heads, attend, self.dropout_rate, train
        make = partial(block, *fields, dtype=self.dtype, **options)
        if self.scan_layers:
            scan = nn.scan(
                lambda block, x, segments: (block(x, segments), None),
                variable_axes={"params": 0},
                in_axes=nn.broadcast,
                split_rngs={"params": True, "dropout": True},
                length=self.num_layers,
            )
            x, _ = scan(make(name="blocks"), x, segments)
        else:
            for index in range(self.num_layers):
                x = make(name=f"block_{index}")(x, segments)
        return nn.LayerNorm(self.norm_epsilon, dtype=self.dtype)(x)


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
        loss_head: Callable[[Array, Array], Any] | None = None,
    ) -> Any:
        """The logits of the token that follows each position, in float32.

        Args:
          tokens: Tokens of each row.
          train: Whether this is training.
          segments: Number of each token's document in its row, where rows are packed. Each document
            has the same logits as alone in a row. None for one document in each row.
          loss_head: Function of the hidden states `(b, t, width)` and the table `(vocab, width)`;
            its result is returned in place of logits.
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
        first = positions[None, :t]
        x = x + (first if segments is None else gather(positions, positions_in(segments)))
        x = x.astype(self.dtype or table.dtype)
        # The residual stream sums two branches per block: GPT-2 scales their last layers down.
        inits = {"kernel_init": init}
        inits["output_init"] = nn.initializers.normal(0.02 / (2 * self.num_layers) ** 0.5)
        x = self.apply_blocks(x, train=train, is_causal=True, segments=segments, **inits)
        if loss_head is not None:
            return loss_head(x, table)
        return jnp.dot(x, table.T.astype(x.dtype)).astype("float32")


# The size that GPT-2's paper calls small, and ViT's paper base.
BASE: dict[str, Any] = {"num_layers": 12, "num_heads": 12, "width": 768}
gpt2 = partial(GPT, **BASE, vocab_size=50257, max_length=1024)


class ViT(Transformer):
    """Embeddings of image patches and learned positions through a stack of blocks.

    Attributes:
      patch_size: Height and width of a patch, in pixels.
      num_classes: Logits per image.
      pooling: Input of the last layer: the "mean" over patches, or a class "token" before them.
    """

    num_layers: int = 6
    patch_size: int = 4
    num_classes: int = 10
    pooling: str = "mean"

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], train: bool = False
    ) -> Float[Array, "b classes"]:
        """The logits, in float32."""
        b, height, width = images.shape[:3]
        if height % self.patch_size or width % self.patch_size:
            raise ConfigError(
                f"images of {height} x {width} pixels do not divide into patches of patch_size "
                f"{self.patch_size}."
            )
        check_choice("pooling", self.pooling, ("mean", "token"))
        patch = (self.patch_size, self.patch_size)
        x = nn.Conv(self.width, patch, strides=patch, padding="VALID", dtype=self.dtype)(images)
        x = x.reshape(b, -1, self.width)
        if self.pooling == "token":
            token = self.param("class_token", nn.initializers.zeros, (1, 1, self.width))
            x = jnp.concatenate([jnp.tile(token, (b, 1, 1)).astype(x.dtype), x], axis=1)
        positions = self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = (x + positions).astype(x.dtype)  # Gradients of positions add up in their dtype.
        x = self.apply_blocks(x, train=train, is_causal=False)
        x = x[:, 0] if self.pooling == "token" else x.mean(axis=1)
        return nn.Dense(self.num_classes, dtype=self.dtype)(x).astype("float32")


vit_b16 = partial(ViT, **BASE, patch_size=16, num_classes=1000, pooling="token", gelu="exact")
