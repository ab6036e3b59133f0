"""Transforms: functions of the rows of a batch, run on the host or in the step on the devices.

    chain = Chain((Normalize(0.5, 0.25), CropAndFlip()))
    batch = chain.with_draws(batch, uniform)      # on the host: adds the random numbers
    batch = chain(batch)                          # here, or in the step

A transform is written once for both places, in the array namespace of its rows: numpy or
`jax.numpy`. Its random numbers come with the rows. They depend on the seed, the epoch and the
example, but not on the batch or the process, so both places give equal rows up to rounding.

Rows for evaluation have no random numbers: transforms that need some are left out there.

Images are the entry "image", `(b, height, width, channels)`, or `(b, height, width)` if they are
grey.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol, runtime_checkable

import numpy as np

from jddp.data.examples import Concatenated, Examples, NumpyBatch, Subset, column_of
from jddp.ground.errors import ConfigError, DataError
from jddp.ground.typing import JsonObject

DRAWS = "draws"  # the entry of a batch with the random numbers of its transforms

_RESOLUTION = 2**24  # float32 has every multiple of 1 / 2^24 below 1


@runtime_checkable
class Transform(Protocol):
    """A function of rows. It must be immutable, hashable and picklable: a frozen dataclass."""

    @property
    def num_draws(self) -> int:
        """Number of random numbers that one example needs; 0 for a fixed function."""

    def __call__(self, batch: NumpyBatch, draws: np.ndarray) -> NumpyBatch:
        """The changed rows; the argument is not modified.

        Args:
          batch: Rows, as arrays of numpy or JAX by name.
          draws: Random numbers in [0, 1), float32 `(b, num_draws)`, of the same library.
        """


@dataclass(frozen=True)
class Chain:
    """Transforms one after the other, as one function of a batch.

    Attributes:
      transforms: The transforms, first one first.
    """

    transforms: tuple[Transform, ...] = ()

    @property
    def num_draws(self) -> int:
        """Number of random numbers that one example needs."""
        return sum(transform.num_draws for transform in self.transforms)

    def with_draws(self, batch: NumpyBatch, uniform: np.ndarray) -> NumpyBatch:
        """The batch, with its random numbers.

        Args:
          batch: Rows, on the host.
          uniform: Random numbers in [0, 1), `(b, num_draws)`, rounded down to float32 here.
        """
        return batch | {DRAWS: (np.floor(uniform * _RESOLUTION) / _RESOLUTION).astype(np.float32)}

    def __call__(self, batch: NumpyBatch) -> NumpyBatch:
        """The changed rows, without their random numbers."""
        rows = {name: x for name, x in batch.items() if name != DRAWS}
        draws = batch.get(DRAWS)
        begin = 0
        for transform in self.transforms:
            end = begin + transform.num_draws
            if draws is not None:
                rows = transform(rows, draws[:, begin:end])
            elif not transform.num_draws:
                rows = transform(rows, np.zeros((1, 0), np.float32))
            begin = end
        return rows


@dataclass(frozen=True, eq=False)
class Transformed:
    """Examples that pass through a fixed transform when they are read.

    Attributes:
      examples: The examples as they are stored.
      transform: Transform without random numbers.
    """

    examples: Examples
    transform: Transform

    def __len__(self) -> int:
        return len(self.examples)

    def column(self, name: str) -> np.ndarray | None:
        """An array of the examples as they are stored, if it is at hand."""
        return column_of(self.examples, name)

    @property
    def files(self) -> Sequence[str] | None:
        """Names of the files of the examples, if each has one."""
        return getattr(self.examples, "files", None)

    def take(self, indices: np.ndarray) -> NumpyBatch:
        """The transformed examples at `indices`."""
        return Chain((self.transform,))(self.examples.take(indices))


def as_stored(examples: Examples) -> tuple[Examples, Chain]:
    """The examples as they are stored, and the transforms through which they pass."""
    match examples:
        case Transformed(stored, transform):
            inner, chain = as_stored(stored)
            return inner, Chain((*chain.transforms, transform))
        case Subset(others, rows):
            inner, chain = as_stored(others)
            return Subset(inner, rows), chain
        case Concatenated(parts):
            stored_parts, chains = zip(*map(as_stored, parts), strict=True)
            if len({*chains}) == 1:
                return Concatenated(stored_parts), chains[0]
    return examples, Chain()


def chain_of(
    examples: Examples, transforms: Sequence[Transform], *, on_device: bool
) -> tuple[Examples, Chain]:
    """The examples to read, and all transforms that then follow.

    Args:
      examples: Examples, perhaps `Transformed` when they are read.
      transforms: Transforms of their rows.
      on_device: Whether the examples are to be read as they are stored.
    """
    stored, fixed = as_stored(examples) if on_device else (examples, Chain())
    return stored, Chain((*fixed.transforms, *transforms))


def namespace_of(array: np.ndarray) -> ModuleType:
    """The library of an array: numpy, or `jax.numpy`."""
    return array.__array_namespace__()


LARGEST = {"uint8": 255, "uint16": 65_535}  # White by dtype; black is 0.


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
        # The rank of the images: a user may let JAX refuse arrays of different ranks.
        shape = [1] * (batch["image"].ndim - 1) + [-1]
        mean, std = (np.asarray(x, np.float32).reshape(shape) for x in (self.mean, self.std))
        scale, offset = np.float32(1 / LARGEST[dtype.name]) / std, mean / std
        return batch | {"image": batch["image"].astype(np.float32) * scale - offset}


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
        return batch | {"image": batch["image"][row, y[:, :, None], x[:, None, :]]}


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
        return batch | {"image": _at(batch["image"], y, x)}


def normalize(mean: float | Sequence[float] = 0.0, std: float | Sequence[float] = 1.0) -> Transform:
    """The normalization with these numbers, each a number or a list.

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


TRANSFORMS: dict[str, Callable[..., Transform]] = {
    "crop_and_flip": CropAndFlip,
    "flip_and_shift": FlipAndShift,
    "normalize": normalize,
}
