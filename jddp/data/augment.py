"""Random changes of training images that leave their class alone.

An augmentation acts in two halves: it draws its choices for a whole batch, then applies a part of
them to a part of the batch. So what happens to a row depends on the seed and the step, and not on
how the batch is spread over processes.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from jddp.data.examples import Batch


@runtime_checkable
class Augment(Protocol):
    """Draws choices for a batch, and applies them to it or to some of its rows."""

    def draw(self, rng: np.random.Generator, num_rows: int) -> dict[str, np.ndarray]:
        """Named choices, each with one entry per row."""

    def apply(self, batch: Batch, choices: dict[str, np.ndarray]) -> Batch:
        """The batch, changed as chosen; the one given stays as it is."""


@dataclass(frozen=True)
class FlipAndShift:
    """Mirrors half of the images left to right and moves all by a few pixels; edges repeat.

    Attributes:
      max_shift: Largest move, in pixels, up, down, left and right.
    """

    max_shift: int = 2

    def draw(self, rng: np.random.Generator, num_rows: int) -> dict[str, np.ndarray]:
        """Draws, per row, whether to mirror and how far to move."""
        moves = rng.integers(-self.max_shift, self.max_shift, (2, num_rows), endpoint=True)
        return {"down": moves[0], "right": moves[1], "mirrored": rng.random(num_rows) < 0.5}

    def apply(self, batch: Batch, choices: dict[str, np.ndarray]) -> Batch:
        """Reads every pixel of the new images from its place in the old ones."""
        images = batch["image"]
        num_rows, height, width = images.shape[:3]
        y = np.clip(np.arange(height) - choices["down"][:, None], 0, height - 1)
        x = np.clip(np.arange(width) - choices["right"][:, None], 0, width - 1)
        x = np.where(choices["mirrored"][:, None], width - 1 - x, x)
        row = np.arange(num_rows)[:, None, None]
        return batch | {"image": images[row, y[:, :, None], x[:, None, :]]}
