"""Numbered examples: their number, and the rows at given indices as one batch.

This is the whole interface of a data set. Arrays are examples as they are (`ArrayExamples`), and an
object with `__len__` and `__getitem__` is a data set of rows (`RowExamples`), as in PyTorch,
Hugging Face, grain and plain lists: a row is a dict of arrays or numbers, or a tuple of them if
names are given. Mistakes that can be found at the start are refused at the start.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jddp.ground.errors import DataError
from jddp.ground.typing import Settings

NumpyBatch = dict[str, np.ndarray]


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
        self._arrays = {name: as_whole(name, array) for name, array in arrays.items()}
        # A mapped array stays mapped, also when it is sent to another process.
        self._arrays |= {name: x for name, x in arrays.items() if isinstance(x, np.memmap)}
        for name, array in self._arrays.items():
            if array.ndim == 0 or array.dtype.kind not in "biuf":
                raise DataError(
                    f"array '{name}' is {array.dtype}{array.shape}. It needs rows of numbers or "
                    "booleans."
                )
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


def column_of(examples: Examples, name: str) -> np.ndarray | None:
    """An array of all examples, such as "label"; None if there is none, or none at hand.

    Args:
      examples: Examples. A method `column(name)` has arrays at hand.
      name: Name of the array.
    """
    column = examples.column(name) if hasattr(examples, "column") else None
    return None if column is None else np.asarray(column)


def in_32_bits(name: str, array: np.ndarray, row_names: Sequence[int] | np.ndarray) -> np.ndarray:
    """The array in 32 bits, in the byte order of this machine: JAX accepts no other.

    Raises:
      DataError: If a number is not finite, or needs 64 bits.
    """
    check_numbers(name, array, row_names)
    return np.asarray(array, _NARROW.get(array.dtype.name, array.dtype.newbyteorder("=")))


def as_whole(name: str, array: object) -> np.ndarray:
    """An array of numpy; a masked one is refused, since its missing values would count."""
    if np.ma.is_masked(array):
        way_out = "Fill them (array.filled(0)), or leave out their rows."
        raise DataError(f"array '{name}' is a masked array with missing values. {way_out}")
    return np.asarray(array)


def check_numbers(name: str, array: np.ndarray, row_names: Sequence[int] | np.ndarray) -> None:
    """Refuses NaN, infinity and numbers that need 64 bits, and names the first row that has one."""
    limits = np.finfo(np.float32) if array.dtype.kind == "f" else np.iinfo(np.int32)
    is_narrow = array.dtype.kind in "biu" and array.dtype.itemsize < 8
    # No second array of this size is made, unless there is a mistake.
    if is_narrow or not array.size or (limits.min <= array.min() and array.max() <= limits.max):
        return
    is_wrong = ~((limits.min <= array) & (array <= limits.max))
    wrong_rows = np.flatnonzero(is_wrong.reshape(len(array), -1).any(1))
    first = array[is_wrong][0]
    mistake = f"{first}, which needs 64 bits" if np.isfinite(first) else "NaN or infinity"
    raise DataError(
        f"array '{name}' holds {mistake}, first in row {row_names[wrong_rows[0]]}. Remove or fix "
        f"the {len(wrong_rows)} rows with such numbers."
    )


class RowExamples:
    """Examples of a data set that returns one row at a time.

    Args:
      rows: Data set with `__len__` and `__getitem__`; `__getitems__`, if any, reads many at once.
      names: Names of the parts of a row, if rows are tuples.
    """

    def __init__(self, rows: Any, *, names: Sequence[str] | None = None) -> None:
        # Hugging Face returns lists of Python numbers unless asked for arrays.
        self._rows = rows.with_format("numpy") if hasattr(rows, "with_format") else rows
        self._names = names

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> np.ndarray | None:
        """A column of all rows, if they are stored by columns."""
        return self._rows.column(name) if hasattr(self._rows, "column") else None

    def take(self, indices: np.ndarray) -> NumpyBatch:
        """The rows at `indices`, stacked by name.

        Raises:
          DataError: If a row has no names, rows differ in shape, or hold no numbers.
        """
        if not len(indices):  # A process may have no row in the last batch.
            return {name: x[:0] for name, x in self.take(np.zeros(1, int)).items()}
        named = [self._named(row) for row in self._rows_at(indices.tolist())]
        parts = {name: [row.get(name) for row in named] for name in named[0]}
        return {name: self._stack(name, part, indices) for name, part in parts.items()}

    def _rows_at(self, indices: list[int]) -> Iterable[object]:
        if hasattr(self._rows, "__getitems__"):
            return self._rows.__getitems__(indices)
        return [self._rows[index] for index in indices]

    def _named(self, row: object) -> Settings:
        if isinstance(row, Mapping):
            return row
        if isinstance(row, tuple | list) and self._names and len(self._names) == len(row):
            return dict(zip(self._names, row, strict=True))
        raise DataError(
            f"a row of the data is {type(row).__name__}, with names {self._names}. Rows must be "
            "dicts, or tuples with names: RowExamples(rows, names=('image', 'label'))."
        )

    def _stack(self, name: str, parts: list[object], indices: np.ndarray) -> np.ndarray:
        arrays = [as_whole(name, part) for part in parts]
        shapes = {array.shape for array in arrays}
        if len(shapes) > 1 or not {array.dtype.kind for array in arrays} <= {*"biuf"}:
            dtypes = ", ".join(sorted({str(array.dtype) for array in arrays}))
            raise DataError(
                f"{name!r} of the data is {dtypes} of shapes {sorted(shapes)}. Rows must hold "
                "numbers, all of one shape: convert, pad or leave out that part before training."
            )
        return in_32_bits(name, np.stack(arrays), indices)


def as_examples(data: object) -> Examples:
    """Examples from a dict of arrays or a data set of rows; `Examples` are returned as they are.

    Raises:
      DataError: If the data is none of these.
    """
    if isinstance(data, Mapping):
        return ArrayExamples(data)
    if isinstance(data, Examples) and not (hasattr(data, "with_format") or hasattr(data, "dtype")):
        return data  # Hugging Face's `take` returns the first rows, an array's `take` elements.
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, tuple):
        return RowExamples(data)
    raise DataError(
        f"data of type {type(data).__name__} cannot be read. Give a dict of arrays, or an object "
        "with __len__() and take(indices) or __getitem__(index)."
    )


@dataclass(frozen=True, eq=False)
class Subset:
    """Some of other examples.

    Attributes:
      examples: The other examples.
      rows: Their indices, in the order of the subset.
    """

    examples: Examples
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> np.ndarray | None:
        """An array of the subset, if it is at hand."""
        column = column_of(self.examples, name)
        return None if column is None else column[self.rows]

    def take(self, indices: np.ndarray) -> NumpyBatch:
        """The examples at `indices` of the subset."""
        return self.examples.take(self.rows[indices])


@dataclass(frozen=True, eq=False)
class Concatenated:
    """The examples of several data sets, whose arrays have the same names, shapes and dtypes.

    Attributes:
      parts: The data sets, at least one.
    """

    parts: Sequence[Examples]

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(part) for part in self.parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def column(self, name: str) -> np.ndarray | None:
        """An array of all parts, if each has it at hand."""
        columns = [column_of(part, name) for part in self.parts]
        known = [column for column in columns if column is not None]
        return np.concatenate(known) if len(known) == len(columns) else None

    def take(self, indices: np.ndarray) -> NumpyBatch:
        """The examples at `indices`, in that order."""
        parts = np.searchsorted(self._ends, indices, side="right")
        rows = indices - np.concatenate([[0], self._ends])[parts]
        batch = self.parts[0].take(rows[:0])
        batch = {name: np.empty((len(rows), *x.shape[1:]), x.dtype) for name, x in batch.items()}
        for part in np.unique(parts).tolist():
            is_here = parts == part
            for name, array in self.parts[part].take(rows[is_here]).items():
                batch[name][is_here] = array
        return batch
