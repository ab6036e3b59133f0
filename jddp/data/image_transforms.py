"""Transforms of images, for the entry "image" of a batch.

Images are `(b, height, width, channels)`, or `(b, height, width)` if they are grey.
If `mixing` has added a second image to each row, "other_image", it is changed in the same way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jddp.data.examples import Examples, NumpyBatch
from jddp.data.transforms import Transform, as_stored, namespace_of
from jddp.errors import ConfigError, DataError
from jddp.typing import JsonObject

IMAGES = ("image", "other_image")
LARGEST = {"uint8": 255, "uint16": 65_535}  # by dtypes: black is 0, and white is this


@dataclass(frozen=True)
class Normalize:
    """Pixels as float32 numbers: over the largest of their dtype, minus `mean`, over `std`.

    Attributes:
      mean: Value to subtract, in the range 0 to 1; one number, or one per channel.
      std: Divisor after that.
    """

    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0
    num_draws = 0

    def __call__(self, batch: NumpyBatch, draws: np.ndarray) -> NumpyBatch:
        """Scales the images; the random numbers are not used.

        Raises:
          DataError: If the images are neither uint8 nor uint16.
        """
        dtype = batch["image"].dtype
        if dtype.name not in LARGEST:
            raise DataError(f"normalize: images are {dtype}. Give uint8 or uint16, of known range.")
        # Of the rank of the images, for those who let JAX refuse arrays of different ranks.
        shape = [1] * (batch["image"].ndim - 1) + [-1]
        mean, std = (np.asarray(x, np.float32).reshape(shape) for x in (self.mean, self.std))
        scale, offset = np.float32(1 / LARGEST[dtype.name]) / std, mean / std
        return _with_images(batch, lambda x: x.astype(np.float32) * scale - offset)


@dataclass(frozen=True)
class FlipAndShift:
    """Mirrors half of the images left to right and moves all by a few pixels; edges repeat.

    Attributes:
      max_shift: Largest move, in pixels, up, down, left and right.
    """

    max_shift: int = 2
    num_draws = 3

    def __call__(self, batch: NumpyBatch, draws: np.ndarray) -> NumpyBatch:
        """Reads every pixel of the new images from its place in the old ones."""
        xp = namespace_of(draws)
        num_rows, height, width = batch["image"].shape[:3]
        down, right = xp.floor(draws.T[:2] * (2 * self.max_shift + 1)) - self.max_shift
        y = xp.clip(np.arange(height)[None] - down[:, None], 0, height - 1).astype(np.int32)
        x = xp.clip(np.arange(width)[None] - right[:, None], 0, width - 1).astype(np.int32)
        x = xp.where(draws[:, 2:] < 0.5, width - 1 - x, x)
        row = np.arange(num_rows)[:, None, None]
        return _with_images(batch, lambda images: images[row, y[:, :, None], x[:, None, :]])


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

    def __call__(self, batch: NumpyBatch, draws: np.ndarray) -> NumpyBatch:
        """Reads every pixel of the new images between four of the old ones, in their dtype."""
        xp = namespace_of(draws)
        height, width = batch["image"].shape[1:3]
        area = self.smallest + (1 - self.smallest) * draws[:, 0]
        ratio = self.widest ** (2 * draws[:, 1] - 1)
        tall = xp.minimum(1, xp.sqrt(area / ratio)) * height
        wide = xp.minimum(1, xp.sqrt(area * ratio)) * width
        y = _centres(draws[:, 2] * (height - tall), tall, height)
        x = _centres(draws[:, 3] * (width - wide), wide, width)
        x = xp.where(draws[:, 4:] < 0.5, x[:, ::-1], x)
        return _with_images(batch, lambda images: _at(images, y, x))


def normalize(mean: float | Sequence[float] = 0.0, std: float | Sequence[float] = 1.0) -> Transform:
    """The normalization with these numbers, of which each may be a list.

    Raises:
      ConfigError: If a standard deviation is not positive.
    """
    if not (np.asarray(std) > 0).all():
        raise ConfigError(f"normalize: std {std} divides pixels. Give positive numbers.")
    return Normalize(*(tuple(x) if isinstance(x, Sequence) else x for x in (mean, std)))


def normalization_of(examples: Examples) -> JsonObject:
    """The arguments of `normalize` by which images are scaled when they are read; empty if not."""
    for transform in as_stored(examples)[1].transforms:
        match transform:
            case Normalize(mean, std):
                return {"mean": mean, "std": std}
    return {}


TRANSFORMS: dict[str, Callable[..., Transform]] = {
    "crop_and_flip": CropAndFlip,
    "flip_and_shift": FlipAndShift,
    "normalize": normalize,
}


def _with_images(batch: NumpyBatch, change: Callable[[np.ndarray], np.ndarray]) -> NumpyBatch:
    return batch | {name: change(batch[name]) for name in IMAGES if name in batch}


def _centres(begin: np.ndarray, length: np.ndarray, num_pixels: int) -> np.ndarray:
    """Positions of the centres of the new pixels among the old ones, `(b, num_pixels)`."""
    places = (np.arange(num_pixels, dtype=np.float32)[None] + 0.5) / num_pixels
    centres = begin[:, None] + places * length[:, None] - 0.5
    return namespace_of(begin).clip(centres, 0, num_pixels - 1)


def _at(images: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Linear interpolation between pixels along both axes; whole numbers are rounded at the end."""
    if images.dtype.kind not in "biu":
        return _between(_between(images, y, axis=1), x, axis=2)
    pixels = _at(images.astype(np.float32), y, x)
    return namespace_of(y).rint(pixels).astype(images.dtype)


def _between(images: np.ndarray, places: np.ndarray, *, axis: int) -> np.ndarray:
    """Linear interpolation between pixels along one axis."""
    xp = namespace_of(places)
    below = xp.floor(places).astype(np.int32)
    shape = [len(images), *[1] * (images.ndim - 1)]
    shape[axis] = places.shape[1]
    share = (places - below).astype(images.dtype).reshape(shape)
    low = below.reshape(shape)
    high = xp.minimum(below + 1, images.shape[axis] - 1).reshape(shape)
    low_pixels = xp.take_along_axis(images, low, axis)
    return low_pixels + share * (xp.take_along_axis(images, high, axis) - low_pixels)
