"""Examples of several data sets, one after the other."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jddp.data.examples import Examples, NumpyBatch, column_of


@dataclass(frozen=True, eq=False)
class Concatenated:
    """The examples of several data sets, whose arrays have the same names, shapes and dtypes.

    Attributes:
      parts: The data sets, at least one.
      names: A name for each, to tell where an example is from.
    """

    parts: Sequence[Examples]
    names: Sequence[str]

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
        parts, rows = self._places(indices)
        batch = self.parts[0].take(rows[:0])
        batch = {name: np.empty((len(rows), *x.shape[1:]), x.dtype) for name, x in batch.items()}
        for part in np.unique(parts).tolist():
            is_here = parts == part
            for name, array in self.parts[part].take(rows[is_here]).items():
                batch[name][is_here] = array
        return batch

    def places(self, indices: np.ndarray) -> list[str]:
        """The data set of each of these examples, and its number there."""
        parts, rows = self._places(indices)
        return [f"{self.names[part]} {row}" for part, row in zip(parts, rows, strict=True)]

    def _places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        parts = np.searchsorted(self._ends, indices, side="right")
        firsts = np.concatenate([[0], self._ends])
        return parts, indices - firsts[parts]
