"""The model: any module of Flax, Linen or NNX. It does not know on how many devices it runs."""

from flax import linen as nn


class Net(nn.Module):
    """A small convolutional network, for images of any size.

    Attributes:
      num_classes: Number of classes; a folder of images sets it to its own.
      width: Channels of the first layer.
    """

    num_classes: int = 2
    width: int = 16

    @nn.compact
    def __call__(self, images, train=False):
        """Logits `(b, num_classes)` of images `(b, height, width, channels)`."""
        x = images
        for i in range(2):
            x = nn.Conv(self.width * 2**i, (3, 3), strides=2, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train)(x)  # over the rows of all devices
            x = nn.relu(x)
        return nn.Dense(self.num_classes)(x.mean(axis=(1, 2)))
