"""Files read by other libraries: Parquet by Hugging Face's `datasets`, ArrayRecord by grain.

- `parquet`: train*.parquet and test*.parquet;
- `hugging_face`: the folders train and test, written by `datasets.Dataset.save_to_disk`;
- `array_record`: train*.array_record and test*.array_record, with a function that makes a dict of
  arrays of the bytes of a record.

They need the extra jddp[data]. Columns that hold anything but numbers are refused, unless
`columns` leaves them out.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jddp.data.extras import import_extra
from jddp.data.source import Source, source_of
from jddp.errors import DataError, FileSystemError
from jddp.zoo.names import resolve_target


def parquet(*, directory: Path, columns: Sequence[str] | None = None) -> Source:
    """The source of Parquet files in a directory; `columns` chooses, None takes all."""

    def read(part: str) -> Any:
        files = _files(directory, part, "parquet")
        try:
            with _quiet_datasets() as datasets:
                return datasets.Dataset.from_parquet(files, keep_in_memory=False, columns=columns)
        except OSError as error:  # no home, or a full one
            reason = f"{directory}: datasets cannot cache these files: {error}."
            raise FileSystemError(f"{reason} Set HF_HOME to a folder for them.") from error

    return source_of(f"parquet {directory}", read("train"), read("test"))


def hugging_face(*, directory: Path, columns: Sequence[str] | None = None) -> Source:
    """The source of data sets that were saved to disk; `columns` chooses, None takes all."""

    def read(part: str) -> Any:
        if not (directory / part).is_dir():
            raise DataError(f"{directory / part}: no such folder. It is needed; see data.dir.")
        with _quiet_datasets() as datasets:
            rows = datasets.load_from_disk(str(directory / part))
        return rows.select_columns(list(columns)) if columns else rows

    return source_of(f"hugging_face {directory}", read("train"), read("test"))


def array_record(*, directory: Path, decode: str) -> Source:
    """The source of ArrayRecord files; `decode`, a target, makes a row of the bytes of a record."""

    def read(part: str) -> Any:
        grain = import_extra("grain", needed_by="array_record")
        records = grain.sources.ArrayRecordDataSource(_files(directory, part, "array_record"))
        function = resolve_target(decode, key="data.kwargs.decode")
        return grain.MapDataset.source(records).map(function)

    return source_of(f"array_record {directory}", read("train"), read("test"))


def _files(root: Path, part: str, ending: str) -> list[str]:
    if not (files := sorted(root.glob(f"{part}*.{ending}"))):
        raise DataError(f"{root}: no files {part}*.{ending}. They are needed; see data.dir.")
    return [str(path) for path in files]


@contextlib.contextmanager
def _quiet_datasets() -> Iterator[Any]:
    """The library `datasets`, without progress bars: a log would have a line for each."""
    datasets = import_extra("datasets", needed_by="this data set")
    # Its environment variable has precedence: datasets would warn of every attempt.
    is_ours = datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS is None
    with contextlib.ExitStack() as afterwards:
        if is_ours and not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            afterwards.callback(datasets.enable_progress_bars)
        yield datasets
