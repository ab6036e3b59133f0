"""Named columns of CSV and Parquet files, in memory, read by Arrow.

    table = read_columns([Path("train.csv")], ["age", "city"])
    ages = table.numbers("age")                        # float64
    cities = table.numbers_of("city", ["Oslo", "Rome"])   # 0 for Oslo, 1 for Rome

Columns of a CSV file are read as text and parsed when they are asked for: one rule, and one error,
for text where numbers should be, whatever the format. Errors name the file, the row and the column.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jddp.data.extras import import_extra
from jddp.data.sources.mapped import refusing_damage, require_file
from jddp.errors import DataError
from jddp.names import did_you_mean

ENDINGS = (".csv", ".parquet")


@dataclass(frozen=True)
class Columns:
    """Some columns of some files, one below the other.

    Attributes:
      files: The files.
      starts: Row at which each file begins.
      rows: Number of each row here among the rows of all files.
      columns: Arrow table of these rows.
    """

    files: Sequence[Path]
    starts: Sequence[int]
    rows: np.ndarray
    columns: Any

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, is_wanted: np.ndarray) -> "Columns":
        """The rows at which `is_wanted` holds."""
        columns = self.columns.filter(import_extra("pyarrow", needed_by="table").array(is_wanted))
        return Columns(self.files, self.starts, self.rows[is_wanted], columns)

    def is_numeric(self, name: str) -> bool:
        """Whether all entries of a column are numbers."""
        return not _is_refused(self.columns[name])

    def numbers(self, name: str) -> np.ndarray:
        """A column of numbers, float64.

        Raises:
          DataError: If an entry is no finite number, or the column holds dates, for example.
        """
        found = _cast(self.columns[name], "float64")
        if found is None:
            raise self._refusal(name, self._first_text(name), "no number")
        numbers = found.to_numpy()
        if len(wrong := np.flatnonzero(~np.isfinite(numbers))):
            raise self._refusal(name, int(wrong[0]), "no finite number")
        return numbers

    def rounding(self, name: str) -> float:
        """The relative rounding of the numbers of a column."""
        kinds = {"halffloat": "float16", "float": "float32"}
        return float(np.finfo(kinds.get(str(self.columns[name].type), "float64")).eps)

    def texts(self, name: str) -> Any:
        """A column as text, an Arrow array; missing entries are empty.

        Raises:
          DataError: If its entries are no text, such as lists.
        """
        texts = _cast(self.columns[name], "string")
        if texts is None:
            kind = self.columns[name].type
            raise DataError(f"{self.files[0]}: column {name!r} is {kind}. It needs text.")
        return texts.fill_null("")

    def categories(self, name: str) -> list[str]:
        """The different entries of a column: in the order of numbers if all are whole numbers."""
        found = self.texts(name).unique().to_pylist()
        return sorted(found, key=int) if all(map(_is_whole, found)) else sorted(found)

    def numbers_of(
        self, name: str, categories: Sequence[str], *, unseen: int | None = None
    ) -> np.ndarray:
        """The number of the category of each row, int32.

        Args:
          name: Name of the column.
          categories: Categories in the order of their numbers.
          unseen: Number of any other category; None if it is an error.

        Raises:
          DataError: If a category is not among them.
        """
        compute = import_extra("pyarrow.compute", needed_by="table")
        arrow = import_extra("pyarrow", needed_by="table")
        known = arrow.array(categories, arrow.string())
        found = compute.index_in(self.texts(name), value_set=known).fill_null(-1).to_numpy()
        if unseen is None and len(wrong := np.flatnonzero(found < 0)):
            listed = f"none of the {len(categories)} categories of the training part"
            raise self._refusal(name, int(wrong[0]), listed)
        return found if unseen is None else np.where(found < 0, np.int32(unseen), found)

    def _first_text(self, name: str) -> int:
        """The row of the first entry that is no number."""
        column = self.columns[name]
        if _is_refused(column.slice(0, 0)):
            raise DataError(
                f"{self.files[0]}: column {name!r} is {column.type}, not numbers. List it in "
                "data.kwargs.categorical, or leave it out."
            )
        lengths = range(len(column) + 1)
        return bisect.bisect_left(lengths, True, key=lambda n: _is_refused(column.slice(0, n))) - 1

    def _refusal(self, name: str, row: int, rule: str) -> DataError:
        number = int(self.rows[row])
        file = bisect.bisect_right(self.starts, number) - 1
        value = self.columns[name][row].as_py()
        return DataError(
            f"{self.files[file]}: row {number - self.starts[file] + 1:,} (from 1, after the names) "
            f"has {value!r} in column {name!r}: {rule}. Correct it, or remove the row."
        )


def read_columns(files: Sequence[Path], names: Sequence[str]) -> Columns:
    """These columns of CSV or Parquet files.

    Raises:
      DataError: If a file is missing or damaged, lacks a column, or there are no rows.
    """
    arrow = import_extra("pyarrow", needed_by="table")
    parts = [_read(path, list(names)) for path in files]
    lengths = [len(part) for part in parts]
    if not (num_rows := sum(lengths)):
        raise DataError(f"{files[0]}: no rows. Add some.")
    with refusing_damage(files[0], "part of the same table as the other files"):
        columns = arrow.concat_tables(parts)
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    return Columns(files, starts, np.arange(num_rows), columns)


def _read(path: Path, names: list[str]) -> Any:
    """An Arrow table of these columns of one file."""
    require_file(path)
    if path.suffix == ".parquet":
        return _read_parquet(path, names)
    return _read_csv(path, names)


def _read_parquet(path: Path, names: list[str]) -> Any:
    parquet = import_extra("pyarrow.parquet", needed_by="table")
    with refusing_damage(path, "Parquet file"), parquet.ParquetFile(path) as file:
        _refuse_missing(path, file.schema_arrow.names, names)
        return file.read(columns=names).select(names)


def _read_csv(path: Path, names: list[str]) -> Any:
    csv = import_extra("pyarrow.csv", needed_by="table")
    with refusing_damage(path, "CSV file"):
        with csv.open_csv(path) as file:
            _refuse_missing(path, file.schema.names, names)
        options = csv.ConvertOptions(
            include_columns=names,
            column_types=dict.fromkeys(names, "string"),
            strings_can_be_null=False,
        )
        return csv.read_csv(path, convert_options=options)


def _refuse_missing(path: Path, there: Sequence[str], names: Sequence[str]) -> None:
    for name in names:
        if there.count(name) != 1:
            how_often = "more than one" if name in there else "no"
            raise DataError(
                f"{path}: {how_often} column {name!r}.{did_you_mean(name, there)} It has "
                f"{', '.join(there)}."
            )


def _cast(column: Any, kind: str) -> Any:
    """The column in another type of Arrow; None if an entry, or its type, does not allow that."""
    errors = import_extra("pyarrow", needed_by="table").lib
    try:
        return column.cast(kind)
    except (errors.ArrowInvalid, errors.ArrowNotImplementedError):
        return None


def _is_refused(column: Any) -> bool:
    return _cast(column, "float64") is None


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and text.isascii()
