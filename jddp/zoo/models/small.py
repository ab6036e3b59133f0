"""Small networks: a convolutional one with batch norm, in Linen and in NNX, and perceptrons.

The convolutional network is the default job's model. Perceptrons take vectors, and images with
their pixels in a row.
"""

import math
from collections.abc import Sequence
from functools import partial

from flax import linen as nn
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

Mask = Float[Array, "b"] | None  # 1 for images, 0 for padding; None counts all images.


class CNN(nn.Module):
    """Strided 3x3 convolutions with batch norm and ReLU, then a dense layer on the whole output.

    Strides replace pooling: a step is several times as fast on CPUs.

    Attributes:
      widths: Channels of each convolution, which halves height and width.
      num_classes: Logits per image.
      dtype: Dtype of the arithmetic; None follows parameters and inputs.
    """

    widths: Sequence[int] = (32, 64, 128)
    num_classes: int = 10
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], train: bool = False, mask: Mask = None
    ) -> Float[Array, "b classes"]:
        """The logits, in float32; batch norm leaves out images of mask 0."""
        x = images
        counts = None if mask is None else mask[:, None, None, None] > 0
        for width in self.widths:
            x = nn.Conv(width, (3, 3), strides=2, use_bias=False, dtype=self.dtype)(x)
            norm = nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)
            x = nn.relu(norm(x, mask=counts))
        return nn.Dense(self.num_classes, dtype=self.dtype)(x.reshape(len(x), -1)).astype("float32")


class CNN_NNX(nnx.Module):
    """The network of `CNN`, layer by layer the same, in NNX.

    It trains or evaluates, as set by `train()` and `eval()`.
    """

    def __init__(
        self,
        widths: Sequence[int] = (32, 64, 128),
        image_size: int = 28,
        num_channels: int = 1,
        num_classes: int = 10,
        dtype: DTypeLike | None = None,
        *,
        rngs: nnx.Rngs,
    ):
        """Makes the parameters.

        Args:
          widths: Channels of each convolution, which halves height and width.
          image_size: Height and width of the images, in pixels.
          num_channels: Channels of the images: 1 for grey, 3 for colour.
          num_classes: Logits per image.
          dtype: Dtype of the arithmetic; None follows parameters and inputs.
          rngs: Random number generators for the initial values.
        """
        self.convs: nnx.List[nnx.Conv] = nnx.List()
        self.norms: nnx.List[nnx.BatchNorm] = nnx.List()
        conv = partial(nnx.Conv, strides=2, use_bias=False, dtype=dtype, rngs=rngs)
        size = image_size
        for num_inputs, width in zip((num_channels, *widths[:-1]), widths, strict=True):
            self.convs.append(conv(num_inputs, width, (3, 3)))
            self.norms.append(nnx.BatchNorm(width, momentum=0.9, dtype=dtype, rngs=rngs))
            size = math.ceil(size / 2)
        self.dense = nnx.Linear(size * size * widths[-1], num_classes, dtype=dtype, rngs=rngs)

    def __call__(
        self, images: Float[Array, "b h w c"], mask: Mask = None
    ) -> Float[Array, "b classes"]:
        """The logits, in float32; batch norm leaves out images of mask 0."""
        x = images
        counts = None if mask is None else mask[:, None, None, None] > 0
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x), mask=counts))
        return self.dense(x.reshape(len(x), -1)).astype("float32")


class MLP(nn.Module):
    """Dense layers with ReLU between them.

    Attributes:
      widths: Outputs of each hidden layer.
      num_outputs: Outputs of the last layer, classes for example.
      dtype: Dtype of the arithmetic; None follows parameters and inputs.
    """

    widths: Sequence[int] = (256, 256)
    num_outputs: int = 10
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "b ..."], train: bool = False) -> Float[Array, "b outputs"]:
        """The outputs in float32, the same in training and evaluation."""
        x = x.reshape(len(x), -1)
        for width in self.widths:
            x = nn.relu(nn.Dense(width, dtype=self.dtype)(x))
        return nn.Dense(self.num_outputs, dtype=self.dtype)(x).astype("float32")
