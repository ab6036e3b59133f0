"""The stack of blocks that the vision transformer and the language model share.

References:
  Vaswani et al., "Attention Is All You Need", NeurIPS 2017. https://arxiv.org/abs/1706.03762
  Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3: the norm
  stands at the input of each branch.
"""

import functools
from typing import Any

import jax
from flax import linen as nn
from flax.typing import Initializer
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jddp.ground.errors import ConfigError, check_choice


class Block(nn.Module):
    """Adds attention, then a two-layer perceptron of four times the width, each of a normed input.

    Attributes:
      num_heads: Heads of the attention, which share the width.
      is_causal: Whether a position sees only itself and earlier positions.
      dropout_rate: Fraction of each branch's outputs that are zeroed in training.
      train: Whether this is training.
      kernel_init: Initial weights.
      output_init: Initial weights of the two layers that end a branch.
      attention: Implementation of the attention: "xla" on any device, or "cudnn" in one kernel
        without weights in memory, on NVIDIA GPUs in 16 bits (`jax.nn.dot_product_attention`).
      norm_epsilon: Number added to the variances of the layer norms.
      gelu: Form of the perceptron's GELU: "exact", or its approximation by a "tanh".
      dtype: Dtype of the arithmetic; None follows parameters and inputs.
    """

    num_heads: int
    is_causal: bool
    dropout_rate: float
    train: bool
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    output_init: Initializer = nn.initializers.xavier_uniform()
    attention: str = "xla"
    norm_epsilon: float = 1e-6
    gelu: str = "tanh"
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "b t width"], segments: Int[Array, "b t"] | None = None
    ) -> Float[Array, "b t width"]:
        """The block's output; positions of different segments do not see each other."""
        x = x + self._attend(self._norm("norm_1")(x), segments)
        return x + self._think(self._norm("norm_2")(x))

    def _attend(self, x: Array, segments: Array | None) -> Array:
        b, t, width = x.shape
        if width % self.num_heads:
            raise ConfigError(f"width {width} does not divide over num_heads {self.num_heads}.")
        check_choice("attention", self.attention, ("xla", "cudnn"))
        options: dict[str, Any] = {"is_causal": self.is_causal, "implementation": self.attention}
        if segments is not None:
            options["mask"] = segments[:, None, :, None] == segments[:, None, None, :]
        x = self._dense(3 * width, self.kernel_init, "query_key_value")(x)
        query, key, value = x.reshape(b, t, 3, self.num_heads, -1).swapaxes(0, 2).swapaxes(1, 2)
        x = jax.nn.dot_product_attention(query, key, value, **options)
        x = self._dense(width, self.output_init, "attention_output")(x.reshape(b, t, width))
        return self._drop(x)

    def _think(self, x: Array) -> Array:
        width = x.shape[-1]
        check_choice("gelu", self.gelu, ("exact", "tanh"))
        x = self._dense(4 * width, self.kernel_init, "mlp_hidden")(x)
        x = nn.gelu(x, approximate=self.gelu == "tanh")
        return self._drop(self._dense(width, self.output_init, "mlp_output")(x))

    def _norm(self, name: str) -> nn.LayerNorm:
        return nn.LayerNorm(self.norm_epsilon, dtype=self.dtype, name=name)

    def _dense(self, width: int, kernel_init: Initializer, name: str) -> nn.Dense:
        return nn.Dense(width, dtype=self.dtype, kernel_init=kernel_init, name=name)

    def _drop(self, x: Array) -> Array:
        return nn.Dropout(self.dropout_rate, deterministic=not self.train)(x)


class Transformer(nn.Module):
    """A model with a stack of `Block`s.

    Attributes:
      num_layers: Number of blocks.
      num_heads: Heads of each attention.
      width: Channels of an embedding.
      dropout_rate: Fraction of embeddings and of branch outputs that are zeroed in training.
      remat: Whether to keep only the input of each block for the backward pass, and compute the
        rest again: less memory, a third more arithmetic.
      scan_layers: Whether to compile one block and loop over it. The parameters of all blocks are
        stacked along a leading dim, and compiling takes as long for a hundred blocks as for one.
      attention: "xla", or "cudnn" for NVIDIA GPUs (see `Block`).
      norm_epsilon: Number added to the variances of the layer norms: 1e-5 in GPT-2, 1e-6 in ViT,
        1e-12 in the ViT of Hugging Face.
      gelu: "tanh", as in GPT-2 and in Google's ViT, or "exact", as in PyTorch's ViTs (see `Block`).
      dtype: Dtype of the arithmetic; None follows parameters and inputs.
    """

    num_layers: int = 4
    num_heads: int = 4
    width: int = 128
    dropout_rate: float = 0.0
    remat: bool = False
    scan_layers: bool = False
    attention: str = "xla"
    norm_epsilon: float = 1e-6
    gelu: str = "tanh"
    dtype: DTypeLike | None = None

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
        # Inside a scan, XLA cannot merge the recomputation with the forward pass.
        block = nn.remat(Block, prevent_cse=not self.scan_layers) if self.remat else Block
        fields = self.num_heads, is_causal, self.dropout_rate, train
        options = inits | {"attention": self.attention, "gelu": self.gelu}
        options |= {"norm_epsilon": self.norm_epsilon, "dtype": self.dtype}
        make = functools.partial(block, *fields, **options)
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
