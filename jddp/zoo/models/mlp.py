"""A multi-layer perceptron: for vectors, or for images with their pixels in a row."""

from collections.abc import Sequence

from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float


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
