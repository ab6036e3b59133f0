"""Files read by other libraries: Parquet by Hugging Face's `datasets`, ArrayRecord by grain.

- `parquet`: train*.parquet and test*.parquet;
- `hugging_face`: the folders train and test, written by `datasets.Dataset.save_to_disk`;
- `array_record`: train*.array_record and test*.array_record, with a function that makes a dict of
  arrays from the bytes of a record.

With `test_share=0.2` this share of the training part is for testing, and no other is read. All need
the extra jddp[data]. Columns that hold anything but numbers are refused, unless `columns` leaves
them out.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jddp.data.extras import import_extra
from jddp.data.source import DataSource, source_of_parts
from jddp.data.sources.decoded_rows import DecodedRows, StoredRows
from jddp.data.sources.mapped import refusing_damage, require_file
from jddp.errors import DataError, Error, FileSystemError
from jddp.names import resolve_target


def parquet(
    *, directory: Path, columns: Sequence[str] | None = None, test_share: float | None = None
) -> DataSource:
    """The source of Parquet files in a directory, with these columns (None for all)."""

    def read(part: str) -> DecodedRows:
        files = _files(directory, part, "parquet")
        where = f"{directory}/{part}*.parquet"
        try:
            with _quiet_datasets() as datasets:
                rows = datasets.Dataset.from_parquet(files, keep_in_memory=False, columns=columns)
        except Error:
            raise
        except Exception as error:  # damaged files can raise anything
            reason = _reason(error)
            if isinstance(reason, OSError) and reason.errno is not None:  # no home, or a full one
                text = f"{directory}: datasets cannot cache these files: {reason}."
                raise FileSystemError(f"{text} Set HF_HOME to a folder for them.") from error
            with refusing_damage(_first_damaged(files) or where, "Parquet file"):
                raise reason from None
        return DecodedRows(rows, where)

    return source_of_parts(f"parquet {directory}", read, test_share)


def hugging_face(
    *, directory: Path, columns: Sequence[str] | None = None, test_share: float | None = None
) -> DataSource:
    """The source of data sets that were saved to disk, with these columns (None for all)."""

    def read(part: str) -> Any:
        if not (directory / part).is_dir():
            raise DataError(f"{directory / part}: no such folder. It is needed; see data.dir.")
        where = str(directory / part)
        with _quiet_datasets() as datasets, refusing_damage(where, "data set of datasets"):
            rows = datasets.load_from_disk(where)
            rows = rows.select_columns(list(columns)) if columns else rows
            # Arrow aborts at places outside of their array. This check reads no numbers.
            rows.data.validate(full=True)
            return DecodedRows(rows, where)

    return source_of_parts(f"hugging_face {directory}", read, test_share)


def array_record(*, directory: Path, decode: str, test_share: float | None = None) -> DataSource:
    """The source of ArrayRecord files; the target `decode` makes a row from a record's bytes."""

    def read(part: str) -> Any:
        grain = import_extra("grain", needed_by="array_record")
        files = _files(directory, part, "array_record")
        where = f"{directory}/{part}*.array_record"
        function = resolve_target(decode, key="data.kwargs.decode")
        with refusing_damage(where, "ArrayRecord file"):
            records = grain.sources.ArrayRecordDataSource(files)
            num_records = len(records)
        if not num_records:
            raise DataError(f"{where}: no records. Write some.")
        return grain.MapDataset.source(StoredRows(records, where)).map(function)

    return source_of_parts(f"array_record {directory}", read, test_share)


def _files(root: Path, part: str, ending: str) -> list[str]:
    if not (files := sorted(root.glob(f"{part}*.{ending}"))):
        raise DataError(f"{root}: no files {part}*.{ending}. They are needed; see data.dir.")
    for path in files:
        require_file(path)
    return [str(path) for path in files]


def _reason(error: BaseException) -> BaseException:
    """The file-system error in a chain of errors; without one, the first error."""
    while not (isinstance(error, OSError) and error.errno is not None):
        before = error.__cause__ or error.__context__
        if before is None:
            break
        error = before
    return error


def _first_damaged(files: Sequence[str]) -> str | None:
    """The first of these Parquet files that is incomplete."""
    parquet = import_extra("pyarrow.parquet", needed_by="parquet")
    for path in files:
        try:
            parquet.read_table(path)
        except Exception:
            return path
    return None


@contextlib.contextmanager
def _quiet_datasets() -> Iterator[Any]:
    """The library `datasets` without progress bars, which would fill a log with lines."""
    datasets = import_extra("datasets", needed_by="this data set")
    # Its environment variable has precedence: datasets would warn of every attempt.
    is_ours = datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS is None
    with contextlib.ExitStack() as afterwards:
        if is_ours and not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            afterwards.callback(datasets.enable_progress_bars)
        log = logging.getLogger("datasets")  # of its own view of what is raised too
        afterwards.callback(log.setLevel, log.level)
        log.setLevel(logging.CRITICAL)
        yield datasets
