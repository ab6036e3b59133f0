"""Rows of CSV and Parquet files, by the names of their columns.

    data.name=table  data.dir=houses
    data.kwargs: {inputs: [area, rooms, city], categorical: [city], target: price}

Numbers are normalized by the mean and the standard deviation of the training part, and categories
are numbered by it. The run keeps both, for `jddp predict RUN --data new.csv`.

All rows are in memory: 4 bytes for each input of each row, and, while files are read, their
columns as text.
"""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from jddp.data.examples import ArrayExamples, NumpyBatch
from jddp.data.extras import import_extra
from jddp.data.source import DataSource, make_data_set, spec_of
from jddp.data.sources.columns import ENDINGS, MISSING, Columns, read_columns
from jddp.data.sources.encoding import FILL, Encoding, encoding_of
from jddp.data.sources.mapped import files_of
from jddp.data.split import selected_parts
from jddp.errors import ConfigError, check_choice


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
        "fill_missing" if in addition missing ones get the mean.
      task: "classification" or "regression"; by default regression if the target is numbers of
        which one is not whole.
      unseen: "error", or "reserve": a category that the training part lacks gets a number of its
        own, whose embedding is never trained.
      test_share: Fraction of the rows that are for testing; None if they are in files of their own.

    Raises:
      ConfigError: If an argument breaks its rule, or pyarrow is not installed.
      DataError: If a file is missing or damaged, lacks a column, has text where numbers are
        needed, or a category or class that only the test part has.
    """
    _check(inputs, categorical, target)
    check_choice("data.kwargs.normalize", normalize, (True, False, FILL))
    check_choice("data.kwargs.task", task, (None, "classification", "regression"))
    check_choice("data.kwargs.unseen", unseen, ("error", "reserve"))
    import_extra("pyarrow", needed_by="table")
    names = [*inputs, target]
    training, testing = selected_parts(
        lambda part: read_columns(files_of(directory, part, *ENDINGS), names),
        test_share,
        Columns.take,
    )
    encoding = encoding_of(training, inputs, categorical, normalize=normalize, unseen=unseen)
    classes = _classes(training, target, task)
    parts = [
        encoding.arrays(part) | _targets(part, target, classes) for part in (training, testing)
    ]
    counts = _counts(parts[0]["label"], classes) if classes else ""
    kept = encoding.to_json()
    digest = sha256(repr((kept, classes)).encode())
    for part in parts:
        for array in part.values():
            digest.update(array.tobytes())
    data = make_data_set(
        f"table {directory}{counts}",
        *parts,
        sha256_hex=digest.hexdigest(),
        classes=classes,
        encoding=kept,
    )
    return DataSource(
        spec_of(data.train),
        lambda: data,
        sizes={"num_classes": len(classes)} if classes else {},
        num_categories=encoding.num_categories,
    )


def rows_in(path: Path, encoding: Encoding) -> ArrayExamples:
    """The inputs of a CSV or Parquet file, encoded like those of a run.

    Raises:
      DataError: As for `table`.
    """
    return ArrayExamples(encoding.arrays(read_columns([path], encoding.columns)))


def _check(inputs: Sequence[str], categorical: Sequence[str], target: str) -> None:
    if not inputs or len({*inputs, target}) != len(inputs) + 1:
        raise ConfigError(
            f"data.kwargs.inputs: {[*inputs]} with target {target!r}. Name at least one column, "
            "each once, and not the target."
        )
    if others := sorted({*categorical} - {*inputs}):
        raise ConfigError(f"data.kwargs.categorical: {others[0]!r} is no input. Add it to inputs.")


def _classes(training: Columns, target: str, task: str | None) -> list[str]:
    """The classes of the target, in the order of their numbers; empty for regression.

    A missing entry is no class: it is refused where the entries are numbered.
    """
    if task == "regression":
        return []
    is_numeric = training.is_numeric(target)
    if task is None and is_numeric:
        numbers = training.numbers([target], allows_missing=True)[target]
        if (np.nan_to_num(numbers) % 1).any():
            return []
    missing = MISSING if is_numeric else ("",)
    return [name for name in training.categories(target) if name not in missing]


def _targets(part: Columns, target: str, classes: Sequence[str]) -> NumpyBatch:
    if classes:
        return {"label": part.numbers_of(target, classes)}
    return {"y": part.numbers([target])[target].astype(np.float32)[:, None]}


def _counts(labels: np.ndarray, classes: Sequence[str]) -> str:
    """Words on the number of training rows of the rarest classes."""
    counts = np.bincount(labels, minlength=len(classes))
    rarest = np.argsort(counts, kind="stable")[:10]
    named = ", ".join(f"{classes[i]!r} {counts[i]:,}" for i in rarest)
    return f", {len(classes)} classes, of which {named}"
