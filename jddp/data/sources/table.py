"""Rows of CSV and Parquet files, by the names of their columns, read by Arrow.

    data.name=table  data.dir=houses
    data.kwargs: {inputs: [area, rooms, city], categorical: [city], target: price}

Numbers are normalized by the mean and the standard deviation of the training part, and categories
are numbered by it. The run keeps both, for `jddp predict RUN --data new.csv`.

Columns of a CSV file are read as text and parsed when they are asked for: one rule, and one error,
for text where numbers should be, whatever the format.

All rows are in memory: 4 bytes for each input of each row, and, while files are read, their
columns as text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from jddp.data.examples import ArrayExamples, NumpyBatch
from jddp.data.source import DataSource, make_data_set, selected_parts, spec_of
from jddp.data.sources.arrays import files_of, import_extra, refusing_damage
from jddp.ground.errors import ConfigError, DataError, check_choice
from jddp.ground.names import did_you_mean
from jddp.ground.typing import JsonObject

ENDINGS = (".csv", ".parquet")
# Entries that count as a missing number.
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null", "None")
FILL = "fill_missing"
FILE, ROW = "\0file", "\0row"  # two more columns: the place of a row

_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$|^[+-]?(?i:inf|infinity)$"


def table_in_files(
    *,
    directory: Path,
    inputs: Sequence[str],
    target: str,
    categorical: Sequence[str] = (),
    normalize: bool | str = True,
    task: str | None = None,
    unseen: str = "error",
    test_share: float | None = None,
) -> DataSource:
    """The source "table": CSV or Parquet files in a directory, which are read into memory.

    Args:
      directory: Folder of train*.csv and test*.csv, or of such files of Parquet; with `test_share`,
        of any such files.
      inputs: Names of the columns that the model gets.
      target: Name of the column that it predicts.
      categorical: The inputs that are categories; the others are numbers.
      normalize: Whether numbers get mean 0 and standard deviation 1 over the training part;
        "fill_missing" if in addition missing ones get the mean. A column of one number, or of
        numbers that differ by rounding alone, gets mean 0 and keeps its scale.
      task: "classification" or "regression"; by default regression if the target is numbers and
        one of them is not whole.
      unseen: "error", or "reserve": a category that the training part lacks gets a number of its
        own, whose embedding is never trained.
      test_share: Fraction of the rows that are for testing; None if they are in files of their own.

    Raises:
      ConfigError: If an argument breaks its rule, or pyarrow is not installed.
      DataError: If a file is missing or damaged, lacks a column, has text where numbers are
        needed, or a category or class that only the test part has.
    """
    if not inputs or len({*inputs, target}) != len(inputs) + 1:
        raise ConfigError(
            f"data.kwargs.inputs: {[*inputs]} with target {target!r}. Name at least one column, "
            "each once, and not the target."
        )
    if others := sorted({*categorical} - {*inputs}):
        raise ConfigError(f"data.kwargs.categorical: {others[0]!r} is no input. Add it to inputs.")
    check_choice("data.kwargs.normalize", normalize, (True, False, FILL))
    check_choice("data.kwargs.task", task, (None, "classification", "regression"))
    check_choice("data.kwargs.unseen", unseen, ("error", "reserve"))
    training, testing = selected_parts(
        lambda part: _read(files_of(directory, part, *ENDINGS), [*inputs, target]),
        test_share,
        lambda rows, indices: rows.take(indices),
    )
    fills = normalize == FILL
    numeric = [name for name in inputs if name not in categorical]
    scales = {name: _scale(training, name, fills) if normalize else (0.0, 1.0) for name in numeric}
    encoding = Encoding(
        {name: mean for name, (mean, _) in scales.items()},
        {name: std for name, (_, std) in scales.items()},
        {name: _categories(training, name) for name in inputs if name in categorical},
        unseen == "reserve",
        fills,
    )
    classes = [] if task == "regression" else _classes(training, target, task)
    digest = sha256(repr((encoding.to_json(), classes)).encode())
    parts = []
    for rows in (training, testing):
        arrays = encoding.arrays(rows)
        if classes:
            arrays["label"] = _numbers_of(rows, target, classes)
        else:
            arrays["y"] = _numbers(rows, target).astype(np.float32)[:, None]
        for array in arrays.values():
            digest.update(array.tobytes())
        parts.append(arrays)
    data = make_data_set(
        f"table {directory}{f', {len(classes)} classes' if classes else ''}",
        *parts,
        sha256_hex=digest.hexdigest(),
        classes=classes,
        encoding=encoding.to_json(),
    )
    return DataSource(
        spec_of(data.train),
        lambda: data,
        sizes={"num_classes": len(classes)} if classes else {},
        num_categories=[len(x) + encoding.reserves_unseen for x in encoding.categories.values()],
    )


@dataclass(frozen=True)
class Encoding:
    """The encoding of the inputs of a table: computed from the training part, then kept.

    Attributes:
      means: Number that is subtracted from a column of numbers, by its name.
      stds: Divisor after the subtraction, by the name of the column.
      categories: Categories of a categorical column, in the order of their numbers, by its name.
      reserves_unseen: Whether any other category has the number after the last one; if not, it is
        an error.
      fills_missing: Whether a missing number is the mean of its column; if not, it is an error.
    """

    means: Mapping[str, float]
    stds: Mapping[str, float]
    categories: Mapping[str, Sequence[str]]
    reserves_unseen: bool = False
    fills_missing: bool = False

    def arrays(self, rows: Any) -> NumpyBatch:
        """float32 "x" `(rows, numbers)`, and int32 "categories" `(rows, columns)` if there are any.

        Raises:
          DataError: If an entry is no number, or its category is unseen and none is reserved.
        """
        x = np.empty((len(rows), len(self.means)), np.float32)
        for i, (name, mean) in enumerate(self.means.items()):
            numbers = _numbers(rows, name, fills=self.fills_missing)
            x[:, i] = np.nan_to_num((numbers - mean) / self.stds[name])
        categories = [
            _numbers_of(rows, name, known, unseen=len(known) if self.reserves_unseen else None)
            for name, known in self.categories.items()
        ]
        return {"x": x, **({"categories": np.stack(categories, 1)} if categories else {})}

    def to_json(self) -> JsonObject:
        """The arguments that make it again; lacks a false `fills_missing`, as old manifests do."""
        return {name: x for name, x in asdict(self).items() if x or name != "fills_missing"}


def rows_in(path: Path, encoding: Encoding) -> ArrayExamples:
    """The inputs of a CSV or Parquet file, encoded like the inputs of a run.

    Raises:
      DataError: As for `table`.
    """
    names = [*encoding.means, *encoding.categories]
    return ArrayExamples(encoding.arrays(_read([path], names)))


def _read(files: Sequence[Path], names: list[str]) -> Any:
    """An Arrow table of these columns of all files, one below the other, and of their places."""
    arrow = import_extra("pyarrow", needed_by="table")
    parts = []
    for path in files:
        part = _read_file(path, names)
        file = arrow.DictionaryArray.from_arrays(np.zeros(len(part), np.int32), [str(path)])
        parts.append(part.append_column(FILE, file).append_column(ROW, [range(1, len(part) + 1)]))
    with refusing_damage(files[0], "table whose columns have the types of all its files"):
        rows = arrow.concat_tables(parts, promote_options="permissive")
    if not len(rows):
        raise DataError(f"{files[0]}: no rows. Add some.")
    return rows


def _read_file(path: Path, names: list[str]) -> Any:
    """An Arrow table of these columns of one file."""
    from pyarrow import csv, parquet

    is_csv = path.suffix != ".parquet"
    with refusing_damage(path, "CSV file" if is_csv else "Parquet file"):
        with csv.open_csv(path) if is_csv else parquet.ParquetFile(path) as file:
            there = file.schema.names if is_csv else file.schema_arrow.names
            for name in names:
                if there.count(name) != 1:
                    raise DataError(
                        f"{path}: no column {name!r}, or more than one."
                        f"{did_you_mean(name, there)} It has {', '.join(there)}."
                    )
            if not is_csv:
                return file.read(columns=names).select(names)
        texts = dict.fromkeys(names, "string")
        options = csv.ConvertOptions(include_columns=names, column_types=texts)
        return csv.read_csv(path, convert_options=options)


def _parsed(rows: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A column as float64, NaN where an entry is no number; and where it is missing."""
    from pyarrow import array, compute

    column = rows[name]
    if column.type != "string":
        with refusing_damage(rows[FILE][0], f"table, whose column {name!r} is numbers"):
            numbers = column.cast("double", safe=False).to_numpy()
        return numbers, np.isnan(numbers)
    is_number = compute.match_substring_regex(column, _NUMBER)
    numbers = compute.if_else(is_number, column, "nan").cast("double")
    is_missing = compute.is_in(column, value_set=array(MISSING))
    return numbers.to_numpy(), is_missing.to_numpy()


def _numbers(rows: Any, name: str, *, fills: bool = False) -> np.ndarray:
    """A column of numbers, float64; with `fills` NaN where one is missing, if not all are.

    Raises:
      DataError: If any other entry is no finite number.
    """
    numbers, is_missing = _parsed(rows, name)
    is_allowed = is_missing & fills & ~is_missing.all()
    way_out = "missing inputs can be the training mean: data.kwargs.normalize=fill_missing"
    _refuse(rows, name, ~np.isfinite(numbers) & ~is_allowed, f"no finite number ({way_out})")
    return numbers


def _scale(rows: Any, name: str, fills: bool) -> tuple[float, float]:
    """Mean and standard deviation; 1 in its place for a column of one number."""
    numbers = _numbers(rows, name, fills=fills)
    numbers = numbers[~np.isnan(numbers)]
    if numbers.min() == numbers.max():  # The mean of equal numbers would be rounded.
        return float(numbers[0]), 1.0
    return float(numbers.mean()), float(numbers.std())


def _texts(rows: Any, name: str) -> Any:
    """A column as text, empty where an entry is missing."""
    with refusing_damage(rows[FILE][0], f"table, whose column {name!r} is text or numbers"):
        return rows[name].cast("string").fill_null("")


def _categories(rows: Any, name: str) -> list[str]:
    """The different entries of a column: in the order of numbers if all are whole numbers."""
    names = _texts(rows, name).unique().to_pylist()
    are_whole = all(re.fullmatch("-?[0-9]+", name) for name in names)
    return sorted(names, key=int if are_whole else None)


def _numbers_of(
    rows: Any, name: str, categories: Sequence[str], *, unseen: int | None = None
) -> np.ndarray:
    """The number of the category of each row, int32.

    Args:
      rows: Rows of a table.
      name: Name of the column.
      categories: Categories in the order of their numbers.
      unseen: Number of any other category; None if it is an error.

    Raises:
      DataError: If a category is not among them.
    """
    known = {text: number for number, text in enumerate(categories)}
    texts = _texts(rows, name).dictionary_encode().combine_chunks()
    numbers = np.array([known.get(x, -1) for x in texts.dictionary.to_pylist()], np.int32)
    numbers = numbers[texts.indices.to_numpy()]
    is_unseen = numbers < 0
    if unseen is None:
        rule = f"none of the {len(categories)} categories of the training part"
        _refuse(rows, name, is_unseen, rule)
    return np.where(is_unseen, np.int32(unseen or 0), numbers)


def _refuse(rows: Any, name: str, is_wrong: np.ndarray, rule: str) -> None:
    """Refuses entries of a column: one error, with their number."""
    if is_wrong.any():
        wrong = np.flatnonzero(is_wrong)
        first = rows.slice(wrong[0], 1).to_pylist()[0]
        raise DataError(
            f"{first[FILE]}: row {first[ROW]:,} (from 1, after the names) has {first[name]!r} in "
            f"column {name!r}: {rule}. Such rows: {len(wrong):,}. Correct or remove them."
        )


def _classes(training: Any, target: str, task: str | None) -> list[str]:
    """The classes of the target, in the order of their numbers; empty for regression.

    A missing entry is no class: it is refused where the entries are numbered.
    """
    numbers, is_missing = _parsed(training, target)
    is_numeric = not (np.isnan(numbers) & ~is_missing).any()
    if task is None and is_numeric:
        numbers = _numbers(training, target, fills=True)
        if (np.nan_to_num(numbers) % 1).any():
            return []
    missing = MISSING if is_numeric else ("",)
    return [name for name in _categories(training, target) if name not in missing]
