"""Splits examples into those for training and those for testing, where the data has one part.

    is_test = rows_for_testing(len(rows), 0.2)
    train, test = selected_parts(read, 0.2, Subset)

The number of a row decides, and no seed: a row stays on its side when others are added after it.
"""

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from jddp.data.examples import Examples, NumpyBatch, column_of
from jddp.errors import ConfigError, DataError


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


_Rows = TypeVar("_Rows", bound=Sized)


def check_share(test_share: float) -> None:
    """Refuses a share of examples for testing that leaves none on one side.

    Raises:
      ConfigError: If it is not between 0 and 1.
    """
    if not 0 < test_share < 1:
        raise ConfigError(f"data.kwargs.test_share: {test_share!r} is not between 0 and 1.")


def rows_for_testing(num_rows: int, test_share: float) -> np.ndarray:
    """Which of the rows are for testing, `(num_rows,)`: about this share of them.

    Raises:
      ConfigError: If the share is not between 0 and 1.
      DataError: If all rows are on one side.
    """
    check_share(test_share)
    # numpy promises Philox's raw bits, not what `Generator` makes of them (NEP 19).
    is_test = np.random.Philox(key=0).random_raw(num_rows) * 2.0**-64 < test_share
    if is_test.all() or not is_test.any():
        raise DataError(
            f"test_share={test_share} leaves one part of {num_rows} rows empty. Choose another "
            "share, or give files for testing."
        )
    return is_test


def selected_parts(
    read: Callable[[str], _Rows],
    test_share: float | None,
    select: Callable[[_Rows, np.ndarray], _Rows],
) -> tuple[_Rows, _Rows]:
    """The rows for training, and the rows for testing.

    Args:
      read: Function that returns the rows of the part "train" or "test"; of "", all.
      test_share: Fraction of all rows that is for testing; None to read both parts.
      select: Function of rows and indices that returns these rows.

    Raises:
      ConfigError: If the share is not between 0 and 1.
      DataError: If one of the two has no row.
    """
    if test_share is None:
        return read("train"), read("test")
    rows = read("")
    is_test = rows_for_testing(len(rows), test_share)
    train, test = (select(rows, np.flatnonzero(x)) for x in (~is_test, is_test))
    return train, test
