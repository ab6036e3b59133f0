"""Named columns of CSV and Parquet files, in memory, read by Arrow.

    table = read_columns([Path("train.csv")], ["age", "city"])
    ages = table.numbers(["age"])["age"]               # float64
    cities = table.numbers_of("city", ["Oslo", "Rome"])   # 0 for Oslo, 1 for Rome

Columns of a CSV file are read as text and parsed when they are asked for: one rule, and one error,
for text where numbers should be, whatever the format. A column whose types differ between files is
read as text too, and booleans and whole numbers are equal however a format writes them. Errors name
the file, the row and the column, and count the rows.
"""

import bisect
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jddp.data.extras import import_extra
from jddp.data.sources.mapped import refusing_damage, require_file
from jddp.errors import DataError
from jddp.names import did_you_mean

log = logging.getLogger("jddp")

ENDINGS = (".csv", ".parquet")
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null", "None")  # for numbers

_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$|^[+-]?(?i:inf|infinity)$"
_WHOLE = re.compile(r"^(-?(?:0|[1-9][0-9]*))\.0*$")  # "1.0"
_FILL = "missing inputs can be the training mean: data.kwargs.normalize=fill_missing"


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

    def take(self, indices: np.ndarray) -> "Columns":
        """The rows at `indices`."""
        return Columns(self.files, self.starts, self.rows[indices], self.columns.take(indices))

    def is_numeric(self, name: str) -> bool:
        """Whether no entry of a column is text, or a date."""
        try:
            numbers, is_missing = self._parsed(name)
        except DataError:
            return False
        return not (np.isnan(numbers) & ~is_missing).any()

    def numbers(
        self, names: Sequence[str], *, allows_missing: bool = False
    ) -> dict[str, np.ndarray]:
        """Columns of numbers by name, float64; NaN where one is missing.

        Raises:
          DataError: If an entry is no finite number, or is missing and this is not allowed; if a
            column has no number at all, or holds dates, for example.
        """
        found = {name: self._parsed(name) for name in names}
        wrong = {}
        for name, (numbers, is_missing) in found.items():
            is_allowed = is_missing & allows_missing & ~is_missing.all()
            wrong[name] = np.flatnonzero(~np.isfinite(numbers) & ~is_allowed)
        self._refuse(wrong, f"no finite number ({_FILL})")
        return {name: numbers for name, (numbers, _) in found.items()}

    def rounding(self, name: str) -> float:
        """The relative rounding of the numbers of a column."""
        kinds = {"halffloat": "float16", "float": "float32"}
        return float(np.finfo(kinds.get(str(self.columns[name].type), "float64")).eps)

    def _parsed(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A column as float64, NaN where an entry is no number; and where it is missing."""
        arrow, compute = _arrow(), import_extra("pyarrow.compute", needed_by="table")
        column = self.columns[name]
        is_missing = column.is_null(nan_is_null=True)
        if column.type == "string":
            column = column.fill_null("")
            is_missing = compute.is_in(column, value_set=arrow.array(MISSING))
            is_number = compute.match_substring_regex(column, _NUMBER)
            column = compute.if_else(is_number, column, arrow.scalar(None, "string"))
        return _cast(self.files, name, column, "double").to_numpy(), is_missing.to_numpy()

    def texts(self, name: str) -> Any:
        """A column as text, an Arrow array; missing entries are empty.

        Raises:
          DataError: If its entries are no text, such as lists.
        """
        return _cast(self.files, name, self.columns[name], "string").fill_null("")

    def categories(self, name: str) -> list[str]:
        """The different entries of a column: in the order of numbers if all are whole numbers."""
        unique = sorted(self.texts(name).unique().to_pylist(), reverse=True)
        names = {_canonical(text): text for text in unique}.values()
        are_whole = all(re.fullmatch("-?[0-9]+", name) for name in names)
        return sorted(names, key=int if are_whole else None)

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
        texts = self.texts(name)
        unique = texts.unique()
        known = {_canonical(x): i for i, x in reversed([*enumerate(categories)])}
        known |= {x: i for i, x in enumerate(categories)}
        numbers = [known.get(x, known.get(_canonical(x), -1)) for x in unique.to_pylist()]
        compute = import_extra("pyarrow.compute", needed_by="table")
        found = np.array(numbers, np.int32)[compute.index_in(texts, value_set=unique).to_numpy()]
        is_unseen = found < 0
        if unseen is None:
            rule = f"none of the {len(categories)} categories of the training part"
            self._refuse({name: np.flatnonzero(is_unseen)}, rule)
        elif is_unseen.all():
            log.warning("%s: column %r has no category of the training part.", self.files[0], name)
        return np.where(is_unseen, np.int32(unseen or 0), found)

    def _refuse(self, wrong: Mapping[str, np.ndarray], rule: str) -> None:
        """Refuses entries, given as rows of columns: one error, with their number."""
        if not (found := {name: rows for name, rows in wrong.items() if len(rows)}):
            return
        name, (row, *_) = next(iter(found.items()))
        file, number = self._place(row)
        counts = [
            f"{len(rows):,} in {name!r}, first "
            + ", ".join(f"{at.name} {n:,}" for at, n in map(self._place, rows[:3]))
            for name, rows in found.items()
        ]
        raise DataError(
            f"{file}: row {number:,} (from 1, after the names) has "
            f"{self.columns[name][int(row)].as_py()!r} in column {name!r}: {rule}. Such rows: "
            f"{'; '.join(counts)}. Correct or remove them."
        )

    def _place(self, row: int) -> tuple[Path, int]:
        """The file of a row, and its number there, from 1."""
        number = int(self.rows[row])
        file = bisect.bisect_right(self.starts, number) - 1
        return self.files[file], number - self.starts[file] + 1


def read_columns(files: Sequence[Path], names: Sequence[str]) -> Columns:
    """These columns of CSV or Parquet files.

    Raises:
      DataError: If a file is missing or damaged, lacks a column, or there are no rows.
    """
    parts = [_read(path, list(names)) for path in files]
    lengths = [len(part) for part in parts]
    if not (num_rows := sum(lengths)):
        raise DataError(f"{files[0]}: no rows. Add some.")
    columns = _arrow().table({name: _joined(files, name, parts) for name in names})
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    return Columns(files, starts, np.arange(num_rows), columns)


def _canonical(text: str) -> str:
    """One text for each boolean and whole number, however a format writes it; others as they are.

    CSV files of pandas have "True" where Parquet has "true", and "1.0" where a column has gaps.
    """
    return text.lower() if text.lower() in ("true", "false") else _WHOLE.sub(r"\1", text)


def _joined(files: Sequence[Path], name: str, parts: Sequence[Any]) -> Any:
    """A column of all files; of text, if their types differ."""
    columns = [part[name] for part in parts]
    types = list(dict.fromkeys(column.type for column in columns))
    if len(types) > 1 or str(types[0]).startswith(("dictionary", "large_string", "string_view")):
        columns = [_cast(files, name, column, "string") for column in columns]
    return _arrow().chunked_array([chunk for column in columns for chunk in column.chunks])


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


def _cast(files: Sequence[Path], name: str, column: Any, kind: str) -> Any:
    """A column in another type of Arrow, "double" or "string"."""
    errors = _arrow().lib
    try:
        return column.cast(kind, safe=False)
    except (errors.ArrowInvalid, errors.ArrowNotImplementedError) as error:
        raise DataError(
            f"{files[0]}: column {name!r} is {column.type}, which becomes no {kind}. Leave it out; "
            "text and dates can be listed in data.kwargs.categorical."
        ) from error


def _arrow() -> Any:
    return import_extra("pyarrow", needed_by="table")
