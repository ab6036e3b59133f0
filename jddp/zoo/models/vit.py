"""A vision transformer.

References:
  Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021. https://arxiv.org/abs/2010.11929
  Its base model for patches of 16 pixels, as PyTorch's libraries compute it, is `vit_b16()`.
  Beyer, Zhai and Kolesnikov, "Better plain ViT baselines for ImageNet-1k", 2022: the mean over
  patches stands for the class token. https://arxiv.org/abs/2205.01580
"""

from functools import partial

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jaxtyping import Float

from jddp.ground.errors import ConfigError, check_choice
from jddp.zoo.models.transformer import Transformer


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


vit_b16 = partial(
    ViT,
    patch_size=16,
    num_layers=12,
    num_heads=12,
    width=768,
    num_classes=1000,
    pooling="token",
    gelu="exact",
)
