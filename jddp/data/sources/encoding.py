"""How the columns of a table become arrays of numbers: decided by the training part, then kept.

encoding = encoding_of(train, inputs, categorical, normalize=True, unseen="error")
arrays = encoding.arrays(test)                        # {"x": ..., "categories": ...}
encoding = Encoding(**json.loads(...))                # as the manifest of a run has it
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from jddp.data.examples import NumpyBatch
from jddp.data.sources.columns import Columns
from jddp.typing import JsonObject

FILL = "fill_missing"


@dataclass(frozen=True)
class Encoding:
    """What is computed from the inputs of a table.

    Attributes:
      means: Number that is subtracted from a column of numbers, by its name.
      stds: Divisor after the subtraction, by the name of the column.
      categories: Categories of a categorical column, in the order of their numbers, by its name.
      reserves_unseen: Whether any other category has the number after the last one; it is an error
        otherwise.
      fills_missing: Whether a missing number is the mean of its column; it is an error otherwise.
    """

    means: Mapping[str, float]
    stds: Mapping[str, float]
    categories: Mapping[str, Sequence[str]]
    reserves_unseen: bool = False
    fills_missing: bool = False

    @property
    def columns(self) -> list[str]:
        """The names of the columns that are read."""
        return [*self.means, *self.categories]

    @property
    def num_categories(self) -> list[int]:
        """Number of categories of each categorical column, with the reserved one."""
        return [len(names) + self.reserves_unseen for names in self.categories.values()]

    def arrays(self, table: Columns) -> NumpyBatch:
        """float32 "x" `(rows, numbers)`, and int32 "categories" `(rows, columns)` if there are any.

        Raises:
          DataError: If an entry is no number, or its category is unseen and none is reserved.
        """
        columns = table.numbers([*self.means], allows_missing=self.fills_missing)
        numbers = [
            np.nan_to_num((x - self.means[name]) / self.stds[name]) for name, x in columns.items()
        ]
        categories = [self._numbers_of(table, name) for name in self.categories]
        found = {"x": np.array(numbers, np.float32)}
        if categories:
            found["categories"] = np.array(categories, np.int32)
        # Without columns too, there are as many rows as in the table.
        return {n: np.ascontiguousarray(x.T.reshape(len(table), -1)) for n, x in found.items()}

    def _numbers_of(self, table: Columns, name: str) -> np.ndarray:
        known = self.categories[name]
        unseen = len(known) if self.reserves_unseen else None
        return table.numbers_of(name, known, unseen=unseen)

    def to_json(self) -> JsonObject:
        """The arguments that make it again; without those that the manifests of old runs lack."""
        return {name: x for name, x in asdict(self).items() if x or name != "fills_missing"}


def encoding_of(
    train: Columns,
    inputs: Sequence[str],
    categorical: Sequence[str],
    *,
    normalize: bool | str,
    unseen: str,
) -> Encoding:
    """The encoding of these inputs, with the statistics and the categories of the training part.

    Args:
      train: The training part.
      inputs: Names of the columns that the model gets.
      categorical: The inputs that are categories; the others are numbers.
      normalize: Whether numbers get mean 0 and standard deviation 1; "fill_missing" if in addition
        missing ones get the mean. A column of one number, or of numbers that differ by rounding
        alone, gets mean 0 and keeps its scale.
      unseen: "reserve" if categories that the training part lacks get a number.

    Raises:
      DataError: If an entry is no number, or a column has none.
    """
    fills_missing = normalize == FILL
    names = [name for name in inputs if name not in categorical]
    numbers = train.numbers(names, allows_missing=fills_missing)
    scales = {name: _scale(x, train.rounding(name)) for name, x in numbers.items()}
    if not normalize:
        scales = dict.fromkeys(names, (0.0, 1.0))
    return Encoding(
        {name: mean for name, (mean, _) in scales.items()},
        {name: std for name, (_, std) in scales.items()},
        {name: train.categories(name) for name in inputs if name in categorical},
        unseen == "reserve",
        fills_missing,
    )


def _scale(column: np.ndarray, rounding: float) -> tuple[float, float]:
    """Mean and standard deviation; 1 in its place where it is the rounding of one number."""
    numbers = column[~np.isnan(column)]
    lowest, highest = float(numbers.min()), float(numbers.max())
    if lowest == highest:  # whose mean would be rounded
        return lowest, 1.0
    std = float(numbers.std())
    return float(numbers.mean()), std if std > rounding * max(-lowest, highest) else 1.0
