"""A small convolutional network with batch norm: the default job's model."""

from collections.abc import Sequence

from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float


class CNN(nn.Module):
    """Strided 3x3 convolutions with batch norm and ReLU, then a dense layer on all that is left.

    Strides instead of pooling: on CPUs a step is several times as fast.

    Attributes:
      widths: Channels of each convolution, which halves height and width.
      num_classes: Logits an image.
      dtype: Of the arithmetic; parameters and statistics are float32.
    """

    widths: Sequence[int] = (32, 64, 128)
    num_classes: int = 10
    dtype: DTypeLike = "float32"

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], train: bool = False
    ) -> Float[Array, "b classes"]:
        """The logits, in float32."""
        x = images
        for width in self.widths:
            x = nn.Conv(width, (3, 3), strides=2, use_bias=False, dtype=self.dtype)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)(x)
            x = nn.relu(x)
        x = x.reshape(len(x), -1)
        return nn.Dense(self.num_classes, dtype=self.dtype)(x).astype("float32")
