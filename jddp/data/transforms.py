"""Transforms: functions of the rows of a batch, run on the host or in the step on the devices.

    chain = Chain((Normalize(0.5, 0.25), CropAndFlip()))
    batch = chain.with_draws(batch, uniform)      # on the host: adds the random numbers
    batch = chain(batch)                          # here, or in the step

A transform is written once for both places, in the array namespace of its rows: numpy or
`jax.numpy`. Its random numbers come with the rows. They depend on the seed, the epoch and the
example, but not on the batch or the process, so both places give equal rows up to rounding.

Rows for evaluation have no random numbers: transforms that need some are left out there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol, runtime_checkable

import numpy as np

from jddp.data.concatenated import Concatenated
from jddp.data.examples import Examples, NumpyBatch, column_of
from jddp.data.split import Subset

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
        if not self.num_draws:
            return batch
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
        case Concatenated(parts, names):
            stored_parts, chains = zip(*map(as_stored, parts), strict=True)
            if len({*chains}) == 1:
                return Concatenated(stored_parts, names), chains[0]
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
