"""Augmentation: random changes of training examples that keep their labels valid.

A change is a function of random numbers, which depend on the seed, the epoch and the example, but
not on the batch or the process.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from jddp.data.examples import Examples, NumpyBatch
from jddp.data.extras import import_extra
from jddp.errors import ConfigError


@runtime_checkable
class Augment(Protocol):
    """A random change of examples."""

    @property
    def num_draws(self) -> int:
        """Number of random numbers that one example needs."""

    def __call__(self, batch: NumpyBatch, uniform: np.ndarray) -> NumpyBatch:
        """The changed batch; the argument is not modified.

        Args:
          batch: Rows.
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

    def __call__(self, batch: NumpyBatch, uniform: np.ndarray) -> NumpyBatch:
        """Reads every pixel of the new images from its place in the old ones."""
        images = batch["image"]
        num_rows, height, width = images.shape[:3]
        down, right = np.floor(uniform.T[:2] * (2 * self.max_shift + 1)) - self.max_shift
        y = np.clip(np.arange(height) - down[:, None], 0, height - 1).astype(int)
        x = np.clip(np.arange(width) - right[:, None], 0, width - 1).astype(int)
        x = np.where(uniform[:, 2:] < 0.5, width - 1 - x, x)
        row = np.arange(num_rows)[:, None, None]
        return batch | {"image": images[row, y[:, :, None], x[:, None, :]]}


@dataclass(frozen=True)
class CropAndFlip:
    """Resizes a random crop of each image to the full size, and mirrors half of them left to right.

    Attributes:
      smallest: Smallest fraction of the image's area in a crop.
      widest: Largest aspect ratio of a crop.

    References:
      Szegedy et al., "Going Deeper with Convolutions", CVPR 2015, section 6.
      https://arxiv.org/abs/1409.4842
    """

    smallest: float = 0.25
    widest: float = 4 / 3
    num_draws = 5

    def __call__(self, batch: NumpyBatch, uniform: np.ndarray) -> NumpyBatch:
        """Reads every pixel of the new images between four pixels of the old ones."""
        images = batch["image"]
        height, width = images.shape[1:3]
        area = self.smallest + (1 - self.smallest) * uniform[:, 0]
        ratio = self.widest ** (2 * uniform[:, 1] - 1)
        tall = np.minimum(1, np.sqrt(area / ratio)) * height
        wide = np.minimum(1, np.sqrt(area * ratio)) * width
        y = _centres(uniform[:, 2] * (height - tall), tall, height)
        x = _centres(uniform[:, 3] * (width - wide), wide, width)
        x = np.where(uniform[:, 4:] < 0.5, x[:, ::-1], x)
        return batch | {"image": _between(_between(images, y, axis=1), x, axis=2)}


def _centres(begin: np.ndarray, length: np.ndarray, num_pixels: int) -> np.ndarray:
    """Positions of the centres of the new pixels among the old ones, `(b, num_pixels)`."""
    places = (np.arange(num_pixels) + 0.5) / num_pixels
    return np.clip(begin[:, None] + places * length[:, None] - 0.5, 0, num_pixels - 1)


def _between(images: np.ndarray, places: np.ndarray, *, axis: int) -> np.ndarray:
    """Linear interpolation between pixels along one axis."""
    below = np.floor(places).astype(int)
    shape = [len(images), 1, 1, 1]
    shape[axis] = places.shape[1]
    share = (places - below).astype(images.dtype).reshape(shape)
    low = below.reshape(shape)
    high = np.minimum(below + 1, images.shape[axis] - 1).reshape(shape)
    low_pixels = np.take_along_axis(images, low, axis)
    return low_pixels + share * (np.take_along_axis(images, high, axis) - low_pixels)


@dataclass(frozen=True)
class Mixup:
    """Mixup: blends each augmented image with another one, and keeps both labels.

    Attributes:
      examples: Examples; one of them is blended with each image.
      parameter: Parameter of the weights, which are drawn from Beta(parameter, parameter).
      augment: Augmentation of both images, or None.

    References:
      Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018.
      https://arxiv.org/abs/1710.09412
    """

    examples: Examples
    parameter: float
    augment: Augment | None = None

    @property
    def num_draws(self) -> int:
        """Random numbers for the augmentation, and two for the other image and its weight."""
        return 2 if self.augment is None else self.augment.num_draws + 2

    def __call__(self, batch: NumpyBatch, uniform: np.ndarray) -> NumpyBatch:
        """The images, with "other_label" and "share", by which the loss weights the two labels.

        Raises:
          ConfigError: If the examples are not images with labels.
        """
        scipy = import_extra("scipy.special", needed_by="data.mixup")  # which takes a while
        if not {"image", "label"} <= batch.keys():
            held = ", ".join(batch)
            raise ConfigError(f"data.mixup mixes images with labels, but the data has {held}.")
        others = self.examples.take((uniform[:, -2] * len(self.examples)).astype(np.int64))
        if self.augment is not None:
            batch, others = (self.augment(rows, uniform[:, :-2]) for rows in (batch, others))
        share = scipy.betaincinv(self.parameter, self.parameter, uniform[:, -1]).astype(np.float32)
        by_image = share.reshape(-1, *[1] * (batch["image"].ndim - 1))
        mixed = by_image * batch["image"] + (1 - by_image) * others["image"]
        mask = {"mask": batch["mask"] * others["mask"]} if "mask" in batch else {}
        return batch | mask | {"image": mixed, "other_label": others["label"], "share": share}
