"""A small convolutional network with batch norm: the default job's model."""

from collections.abc import Sequence

from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float


class CNN(nn.Module):
    """Strided 3x3 convolutions with batch norm and ReLU, then a dense layer on all of it.

    Strides instead of pooling: on CPUs a step is several times as fast.

    Attributes:
      widths: Channels of each convolution, which halves height and width.
      num_classes: Logits per image.
      dtype: Dtype of the arithmetic; parameters and statistics are float32.
    """

    widths: Sequence[int] = (32, 64, 128)
    num_classes: int = 10
    dtype: DTypeLike = "float32"

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "b h w c"],
        train: bool = False,
        mask: Float[Array, "b"] | None = None,
    ) -> Float[Array, "b classes"]:
        """The logits, in float32; batch norm leaves out images of mask 0."""
        x, counts = images, None if mask is None else mask[:, None, None, None] > 0
        for width in self.widths:
            x = nn.Conv(width, (3, 3), strides=2, use_bias=False, dtype=self.dtype)(x)
            norm = nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)
            x = nn.relu(norm(x, mask=counts))
        x = x.reshape(len(x), -1)
        return nn.Dense(self.num_classes, dtype=self.dtype)(x).astype("float32")
