"""Random changes of training examples that leave what is to be learnt from them alone.

What happens to an example follows from the numbers it is given, which depend on the seed, the epoch
and the example: not on the batch it is in, nor on who holds it.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from jddp.data.examples import Batch


@runtime_checkable
class Augment(Protocol):
    """Changes examples at random.

    Attributes:
      num_draws: Random numbers that one example needs.
    """

    num_draws: int

    def __call__(self, batch: Batch, uniform: np.ndarray) -> Batch:
        """The batch, changed; the one given stays as it is.

        Args:
          batch: Some rows.
          uniform: Random numbers in [0, 1), `(b, num_draws)`.
        """


@dataclass(frozen=True)
class FlipAndShift:
    """Mirrors half of the images left to right and moves all by a few pixels; edges repeat.

    Attributes:
      max_shift: Largest move, in pixels, up, down, left and right.
    """

    max_shift: int = 2
    num_draws = 3

    def __call__(self, batch: Batch, uniform: np.ndarray) -> Batch:
        """Reads every pixel of the new images from its place in the old ones."""
        images = batch["image"]
        num_rows, height, width = images.shape[:3]
        down, right = np.floor(uniform.T[:2] * (2 * self.max_shift + 1)) - self.max_shift
        y = np.clip(np.arange(height) - down[:, None], 0, height - 1).astype(int)
        x = np.clip(np.arange(width) - right[:, None], 0, width - 1).astype(int)
        x = np.where(uniform[:, 2:] < 0.5, width - 1 - x, x)
        row = np.arange(num_rows)[:, None, None]
        return batch | {"image": images[row, y[:, :, None], x[:, None, :]]}
