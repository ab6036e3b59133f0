"""Residual networks: ResNet-18 and ResNet-50, with a stem for small or for large images.

References:
  He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.
  https://arxiv.org/abs/1512.03385. The CIFAR stem follows its section 4.2, on the networks of
  section 4.1. Downsampling bottlenecks stride in their 3x3 convolution, as is usual since. 3x3
  convolutions pad by one on each side, even where they stride, as in the paper and torchvision.
  Goyal et al., "Accurate, Large Minibatch SGD", 2017. https://arxiv.org/abs/1706.02677. Section
  5.1: the last norm of each block starts at zero, so that the block starts as the identity.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from jddp.ground.errors import check_choice
from jddp.zoo.models.small import Mask

_Layer = Callable[..., Callable[..., Array]]


class _Block(nn.Module):
    width: int
    strides: int
    conv: _Layer
    norm: _Layer


class BasicBlock(_Block):
    """Two 3x3 convolutions, with the input added to their result.

    Attributes:
      width: Channels inside and of the output.
      strides: Strides of the first convolution, in both directions.
      conv: Function that makes a convolution.
      norm: Function that makes a batch norm.
    """

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 c2"]:
        """The block's output."""
        y = nn.relu(self.norm()(_conv_3x3(self, self.strides)(x)))
        y = self.norm(scale_init=nn.initializers.zeros)(_conv_3x3(self)(y))
        return nn.relu(y + _shortcut(self, x, y.shape))


class BottleneckBlock(_Block):
    """A 3x3 convolution between two 1x1 convolutions, with the input added to their result.

    Attributes:
      width: Channels inside; the output has four times as many.
      strides: Strides of the 3x3 convolution, in both directions.
      conv: Function that makes a convolution.
      norm: Function that makes a batch norm.
    """

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 c2"]:
        """The block's output."""
        y = nn.relu(self.norm()(self.conv(self.width, (1, 1))(x)))
        y = nn.relu(self.norm()(_conv_3x3(self, self.strides)(y)))
        y = self.norm(scale_init=nn.initializers.zeros)(self.conv(4 * self.width, (1, 1))(y))
        return nn.relu(y + _shortcut(self, x, y.shape))


def _conv_3x3(block: _Block, strides: int = 1) -> Callable[..., Array]:
    return block.conv(block.width, (3, 3), strides=strides, padding=1)


def _shortcut(block: _Block, x: Array, shape: tuple[int, ...]) -> Array:
    """The block's input, projected where the output has another shape."""
    if x.shape == shape:
        return x
    x = block.conv(shape[-1], (1, 1), strides=block.strides, name="projection")(x)
    return block.norm(name="projection_norm")(x)


class ResNet(nn.Module):
    """Stages of residual blocks, each with half the resolution and twice the width of the last.

    Attributes:
      stage_sizes: Blocks of each stage.
      block: Kind of block.
      width: Channels of the first stage.
      num_classes: Logits per image.
      stem: "imagenet" begins with a quarter of the resolution, "cifar" with all of it.
      dtype: Dtype of the arithmetic; None follows parameters and inputs.
    """

    stage_sizes: Sequence[int]
    block: type[BasicBlock] | type[BottleneckBlock]
    width: int = 64
    num_classes: int = 1000
    stem: str = "imagenet"
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], train: bool = False, mask: Mask = None
    ) -> Float[Array, "b classes"]:
        """The logits, in float32; batch norm leaves out images of mask 0."""
        check_choice("stem", self.stem, ("cifar", "imagenet"))
        init = nn.initializers.he_normal()
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype, kernel_init=init)
        counts = None if mask is None else mask[:, None, None, None] > 0

        def norm(**options: Any) -> Callable[..., Array]:
            options |= {"use_running_average": not train, "momentum": 0.9, "dtype": self.dtype}
            return partial(nn.BatchNorm(**options), mask=counts)

        if self.stem == "imagenet":
            x = nn.relu(norm()(conv(self.width, (7, 7), strides=2, padding=3)(images)))
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        else:
            x = nn.relu(norm()(conv(self.width, (3, 3))(images)))
        for stage, num_blocks in enumerate(self.stage_sizes):
            for index in range(num_blocks):
                strides = 2 if stage > 0 and index == 0 else 1
                x = self.block(self.width * 2**stage, strides, conv, norm)(x)
        return nn.Dense(self.num_classes, dtype=self.dtype)(x.mean(axis=(1, 2))).astype("float32")


resnet18 = partial(ResNet, stage_sizes=(2, 2, 2, 2), block=BasicBlock)
resnet50 = partial(ResNet, stage_sizes=(3, 4, 6, 3), block=BottleneckBlock)
