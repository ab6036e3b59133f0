"""Numbered examples: their number, and the rows at given indices as one batch.

This is the whole interface of a data set. One kind is here: arrays as they are (`ArrayExamples`).
Mistakes that can be found at the start are refused at the start.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from jddp.errors import DataError

NumpyBatch = dict[str, np.ndarray]

_NUM_READ = 1024  # examples at a time, of which only the labels are kept

# The dtypes that JAX would convert to; converted here, so that specs are known beforehand.
_NARROW = {"float64": np.float32, "int64": np.int32, "uint64": np.uint32}


@runtime_checkable
class Examples(Protocol):
    """A data set with random access."""

    def __len__(self) -> int:
        """The number of examples."""

    def take(self, indices: np.ndarray) -> NumpyBatch:
        """The examples at `indices`, in that order, stacked into one array per name."""


class ArrayExamples:
    """Examples that are the rows of equally long arrays."""

    def __init__(self, arrays: Mapping[str, object]):
        """Checks the arrays; does not copy them.

        Args:
          arrays: Arrays by name. 64-bit numbers are returned in 32 bits. Numbers in a mapped array
            are checked when they are read.

        Raises:
          DataError: If there is no array or no row, lengths differ, an array holds neither
            numbers nor booleans, a number is not finite, is masked, or needs 64 bits.
        """
        if not arrays:
            raise DataError("the data holds no arrays. Give a dict such as {'x': ..., 'y': ...}.")
        refuse_masked(arrays)
        self._arrays = {name: np.asarray(array) for name, array in arrays.items()}
        # A mapped array stays one, also when it is sent to another process.
        self._arrays |= {name: x for name, x in arrays.items() if isinstance(x, np.memmap)}
        for name, array in self._arrays.items():
            if array.ndim == 0 or array.dtype.kind not in "biuf":
                found = f"{array.dtype}{array.shape}"
                raise DataError(f"array '{name}' is {found}. It needs rows of numbers or booleans.")
            if not isinstance(array, np.memmap):
                check_numbers(name, array, range(len(array)))
        lengths = {name: len(array) for name, array in self._arrays.items()}
        if len(set(lengths.values())) != 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise DataError(
                f"arrays have different lengths: {listed}. Each needs a row per example."
            )
        if not next(iter(lengths.values())):
            raise DataError(f"arrays {sorted(lengths)} hold 0 examples. At least one is needed.")

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def column(self, name: str) -> np.ndarray | None:
        """The array of this name, if there is one."""
        return self._arrays.get(name)

    def take(self, indices: np.ndarray) -> NumpyBatch:
        """The rows at `indices` of every array.

        Raises:
          DataError: If a number of a mapped array is not finite, or needs 64 bits.
        """
        return {name: in_32_bits(name, x[indices], indices) for name, x in self._arrays.items()}


def column_of(examples: Examples, name: str, *, reads: bool = False) -> np.ndarray | None:
    """An array of all examples, such as "label"; None if there is none, or none at hand.

    Args:
      examples: Examples. A method `column(name)`, or an attribute `labels`, has arrays at hand.
      name: Name of the array.
      reads: Whether all examples are read for an array that is not at hand.
    """
    column = examples.column(name) if hasattr(examples, "column") else None
    if column is None and name == "label":
        column = getattr(examples, "labels", None)
    if column is not None or not reads or name not in examples.take(np.arange(1)):
        return None if column is None else np.asarray(column)
    parts = np.array_split(np.arange(len(examples)), 1 + len(examples) // _NUM_READ)
    return np.concatenate([examples.take(part)[name] for part in parts])


def in_32_bits(name: str, array: np.ndarray, row_names: Sequence[int] | np.ndarray) -> np.ndarray:
    """The array in 32 bits, in the byte order of this machine: JAX accepts no other.

    Raises:
      DataError: If a number is not finite, or needs 64 bits.
    """
    check_numbers(name, array, row_names)
    return np.asarray(array, _NARROW.get(array.dtype.name, array.dtype.newbyteorder("=")))


def refuse_masked(arrays: Mapping[str, object]) -> None:
    """Refuses masked arrays with missing values, which would count as ordinary values.

    Raises:
      DataError: If there is such an array.
    """
    for name, array in arrays.items():
        if np.ma.is_masked(array):
            raise DataError(
                f"array '{name}' is a masked array with missing values. Fill them "
                "(array.filled(0)), or leave out their rows."
            )


def check_numbers(name: str, array: np.ndarray, row_names: Sequence[int] | np.ndarray) -> None:
    """Refuses NaN, infinity and numbers that need 64 bits, and names the first row that has one."""
    limits = np.finfo(np.float32) if array.dtype.kind == "f" else np.iinfo(np.int32)
    is_narrow = array.dtype.kind in "biu" and array.dtype.itemsize < 8
    # No array of the same size is made, unless it contains a mistake.
    if is_narrow or not array.size or (limits.min <= array.min() and array.max() <= limits.max):
        return
    is_wrong = ~((limits.min <= array) & (array <= limits.max))
    wrong_rows = np.flatnonzero(is_wrong.reshape(len(array), -1).any(1))
    first = array[is_wrong][0]
    what = f"holds {first}, which needs 64 bits" if np.isfinite(first) else "holds NaN or infinity"
    raise DataError(
        f"array '{name}' {what}, first in row {row_names[wrong_rows[0]]}. Remove or fix the "
        f"{len(wrong_rows)} rows with such numbers."
    )
