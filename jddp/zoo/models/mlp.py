"""Multi-layer perceptrons: for vectors, images with their pixels in a row, and tables.

Reference:
  Guo and Berkhahn, "Entity Embeddings of Categorical Variables", 2016,
  https://arxiv.org/abs/1604.06737
"""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

MAX_WIDTH = 50  # Limit for the width of an embedding.


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


class Tabular(nn.Module):
    """An MLP over the numbers of a row, and over an embedding of each of its categories.

    Attributes:
      num_categories: Number of categories of each categorical column.
      num_classes: Number of classes; 1 for regression.
      widths: Outputs of each hidden layer.
      dtype: Dtype of the arithmetic; None follows parameters and inputs.
    """

    num_categories: Sequence[int] = ()
    num_classes: int = 1
    widths: Sequence[int] = (256, 256)
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b numbers"],
        train: bool = False,
        categories: Int[Array, "b columns"] | None = None,
    ) -> Float[Array, "b classes"]:
        """The outputs in float32, the same in training and evaluation."""
        inputs = [x]
        if categories is not None:
            for column, number in enumerate(self.num_categories):
                embed = nn.Embed(number, width_of(number), dtype=self.dtype, name=f"embed_{column}")
                inputs.append(embed(categories[:, column]))
        joined = jnp.concatenate(inputs, axis=-1)
        return MLP(self.widths, self.num_classes, self.dtype, name="mlp")(joined)


def width_of(num_categories: int) -> int:
    """The width of an embedding: half as many numbers as categories, and 50 at most."""
    return min(MAX_WIDTH, (num_categories + 1) // 2)
