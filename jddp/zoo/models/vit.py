"""A vision transformer.

References:
  Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021. https://arxiv.org/abs/2010.11929
  Beyer, Zhai and Kolesnikov, "Better plain ViT baselines for ImageNet-1k", 2022: the mean over
  patches stands for the class token. https://arxiv.org/abs/2205.01580
"""

from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from jddp.errors import ConfigError
from jddp.zoo.models.transformer import apply_blocks


class ViT(nn.Module):
    """Patches of an image, embedded, with learned positions, through a stack of blocks.

    Attributes:
      patch_size: Height and width of a patch, in pixels.
      num_layers: Number of blocks.
      num_heads: Heads of each attention.
      width: Channels of a patch's embedding.
      num_classes: Logits an image.
      dropout_rate: Share of embeddings and of branch outputs that are zeroed in training.
      attention: "xla", or "cudnn" for NVIDIA GPUs (see `transformer.Block`).
      dtype: Of the arithmetic; parameters are float32.
    """

    patch_size: int = 4
    num_layers: int = 6
    num_heads: int = 4
    width: int = 128
    num_classes: int = 10
    dropout_rate: float = 0.0
    attention: str = "xla"
    dtype: DTypeLike = "float32"

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
        patch = (self.patch_size, self.patch_size)
        x = nn.Conv(self.width, patch, strides=patch, padding="VALID", dtype=self.dtype)(images)
        x = x.reshape(b, -1, self.width)
        positions = self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = x + positions.astype(x.dtype)
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        x = apply_blocks(
            x,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            is_causal=False,
            dropout_rate=self.dropout_rate,
            train=train,
            attention=self.attention,
            dtype=self.dtype,
        )
        x = nn.LayerNorm(dtype=self.dtype)(x).mean(axis=1)
        return nn.Dense(self.num_classes, dtype=self.dtype)(x).astype("float32")
