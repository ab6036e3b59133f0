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
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from jddp.data.extras import import_extra
from jddp.data.sources.mapped import refusing_damage, require_file
from jddp.errors import DataError
from jddp.names import did_you_mean

ENDINGS = (".csv", ".parquet")
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null", "None")  # for numbers

_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_WHOLE = re.compile(r"-?(0|[1-9][0-9]*)(\.0*|(\.[0-9]*)?e\+[0-9]{1,2})?")  # also "1.0", "1e+15"
_FILL = " data.kwargs.normalize=fill_missing gives missing inputs the mean of the training part."
_NUM_LISTED = 3  # rows of a column in an error


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
        """Whether all entries of a column are numbers, but for missing ones."""
        try:
            numbers, is_missing = self._parsed(name)
        except DataError:  # dates, for example
            return False
        return bool((np.isfinite(numbers) | is_missing).all())

    def numbers(
        self, names: Sequence[str], *, allows_missing: bool = False
    ) -> dict[str, np.ndarray]:
        """Columns of numbers by name, float64; NaN where one is missing.

        Raises:
          DataError: If an entry is no finite number, or is missing and this is not allowed; if a
            column has no number at all, or holds dates, for example.
        """
        found, wrong, way_out = {}, {}, ""
        for name in names:
            found[name], is_missing = self._parsed(name)
            is_wrong = ~np.isfinite(found[name])
            if allows_missing and not is_missing.all():
                is_wrong &= ~is_missing
            if is_wrong.any():
                wrong[name] = np.flatnonzero(is_wrong)
                way_out = _FILL if (is_wrong & is_missing).any() else way_out
        if wrong:
            raise self._refusal(wrong, "no finite number", way_out)
        return found

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
        return _cast(self.files, name, column, "float64").to_numpy(), is_missing.to_numpy()

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
        return sorted(names, key=int) if all(map(_is_whole, names)) else sorted(names)

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
        if unseen is None and is_unseen.any():
            listed = f"none of the {len(categories)} categories of the training part"
            raise self._refusal({name: np.flatnonzero(is_unseen)}, listed)
        if is_unseen.all():
            logging.getLogger("jddp").warning(
                "%s: column %r has no category of the training part, such as %r: its rows have %r.",
                self.files[0],
                name,
                categories[0],
                unique[0].as_py(),
            )
        return found if unseen is None else np.where(is_unseen, np.int32(unseen), found)

    def _refusal(self, wrong: Mapping[str, np.ndarray], rule: str, way_out: str = "") -> DataError:
        """The error for the rows, by column, whose entries break a rule."""
        (name, rows), *_ = wrong.items()
        value = self.columns[name][int(rows[0])].as_py()
        file, number = self._place(rows[0])
        counts = []
        for column, rows in wrong.items():
            places = [self._place(row) for row in rows[:_NUM_LISTED]]
            named = [f"{n:,}" if at == file else f"{n:,} of {at.name}" for at, n in places]
            more = ", ..." if len(rows) > _NUM_LISTED else ""
            counts.append(f"{len(rows):,} in {column!r} ({', '.join(named)}{more})")
        return DataError(
            f"{file}: row {number:,} (from 1, after the names) has {value!r} in column {name!r}: "
            f"{rule}. Such rows: {'; '.join(counts)}. Correct or remove them.{way_out}"
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
    if text.lower() in ("true", "false"):
        return text.lower()
    if not _WHOLE.fullmatch(text):
        return text
    number = Decimal(text)
    return str(int(number)) if number == int(number) else text


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
    """A column in another type of Arrow, "float64" or "string"."""
    errors = _arrow().lib
    try:
        return column.cast(kind, safe=False)
    except (errors.ArrowInvalid, errors.ArrowNotImplementedError) as error:
        wanted = {
            "float64": "numbers. List it in data.kwargs.categorical, or leave it out.",
            "string": "text. Leave it out.",
        }
        found = f"{files[0]}: column {name!r} is {column.type}"
        raise DataError(f"{found}, not {wanted[kind]}") from error


def _arrow() -> Any:
    return import_extra("pyarrow", needed_by="table")


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and text.isascii()
