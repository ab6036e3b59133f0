"""The default job's network, as one writes it by hand: its batch norm names the axis."""

from flax import linen as nn


class ConvNet(nn.Module):
    widths: tuple[int, ...] = (32, 64, 128)
    num_classes: int = 10
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, train):
        for width in self.widths:
            x = nn.Conv(width, (3, 3), strides=2, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=self.axis_name)(
                x
            )
            x = nn.relu(x)
        return nn.Dense(self.num_classes)(x.reshape(len(x), -1))
