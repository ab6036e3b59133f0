"""Data sets of other libraries, read row by row: PyTorch, Hugging Face, grain, plain lists.

An object with `__len__` and `__getitem__` is a data set. A row is a dict of arrays or numbers, or a
tuple of them if names are given. This module stacks rows into batches.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jddp.data.examples import ArrayExamples, Examples, NumpyBatch, in_32_bits, refuse_masked
from jddp.errors import DataError
from jddp.typing import Settings


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
        if not len(indices):  # on a process without a row in the last batch
            return {name: x[:0] for name, x in self.take(np.zeros(1, int)).items()}
        if hasattr(self._rows, "__getitems__"):
            rows = self._rows.__getitems__(indices.tolist())
        else:
            rows = [self._rows[index] for index in indices.tolist()]
        named = [self._named(row) for row in rows]
        parts = {name: [row.get(name) for row in named] for name in named[0]}
        return {name: self._stack(name, part, indices) for name, part in parts.items()}

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
        for part in parts:
            refuse_masked({name: part})
        arrays = [np.asarray(part) for part in parts]
        shapes = {array.shape for array in arrays}
        if len(shapes) > 1 or not {array.dtype.kind for array in arrays} <= {*"biuf"}:
            dtypes = ", ".join(sorted({str(array.dtype) for array in arrays}))
            found = f"{dtypes} of shapes {sorted(shapes)}"
            raise DataError(
                f"{name!r} of the data is {found}. Rows must hold numbers, all of one shape: "
                "convert, pad or leave out that part before training."
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
        return data  # Hugging Face's `take` returns the first rows; an array's, elements
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, tuple):
        return RowExamples(data)
    raise DataError(
        f"data of type {type(data).__name__} cannot be read. Give a dict of arrays, or an object "
        "with __len__() and take(indices) or __getitem__(index)."
    )
