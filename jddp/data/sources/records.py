"""Files that others read: Parquet by Hugging Face's `datasets`, ArrayRecord by grain.

- `parquet`: train*.parquet and test*.parquet;
- `hugging_face`: the folders train and test, written by `datasets.Dataset.save_to_disk`;
- `array_record`: train*.array_record and test*.array_record, with a function that makes a dict of
  arrays of the bytes of a record.

They are the extra jddp[data]. Columns that hold anything but numbers are refused, unless `columns`
leaves them out.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jddp.data.rows import RowExamples
from jddp.data.source import Source, make_data_set, spec_of
from jddp.data.sources.arrays_on_disk import checked_directory
from jddp.errors import ConfigError, DataError
from jddp.zoo.names import resolve_target


class DecodedRecords:
    """Records as rows.

    Args:
      records: Gives bytes for a number.
      decode: "package.module:function", which makes a row of them.
    """

    def __init__(self, records: Any, decode: str) -> None:
        self._records, self._decode = records, decode
        self._function: Callable[[bytes], Any] | None = None

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Any:
        if self._function is None:
            self._function = resolve_target(self._decode, key="data.kwargs.decode")
        return self._function(self._records[index])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_function": None}  # Found again where it is sent.


def parquet(*, source: str, directory: str | None, columns: Sequence[str] | None = None) -> Source:
    """The source of Parquet files in a directory; `columns` chooses, None takes all."""

    def read(root: Path, part: str) -> Any:
        files = [str(path) for path in _files(root, part, "parquet")]
        arguments = {"columns": list(columns)} if columns else {}
        with _quiet_datasets() as datasets:
            return datasets.Dataset.from_parquet(files, keep_in_memory=False, **arguments)

    return _source("parquet", source, directory, read)


def hugging_face(
    *, source: str, directory: str | None, columns: Sequence[str] | None = None
) -> Source:
    """The source of data sets that were saved to disk; `columns` chooses, None takes all."""

    def read(root: Path, part: str) -> Any:
        if not (root / part).is_dir():
            raise DataError(f"{root / part}: no such folder. It is needed; see data.dir.")
        with _quiet_datasets() as datasets:
            rows = datasets.load_from_disk(str(root / part))
        return rows.select_columns(list(columns)) if columns else rows

    return _source("hugging_face", source, directory, read)


def array_record(*, source: str, directory: str | None, decode: str) -> Source:
    """The source of ArrayRecord files; `decode`, a target, makes a row of the bytes of a record."""

    def read(root: Path, part: str) -> Any:
        files = [str(path) for path in _files(root, part, "array_record")]
        records = _library("grain").sources.ArrayRecordDataSource(files)
        return DecodedRecords(records, decode)

    return _source("array_record", source, directory, read)


def _source(
    name: str, source: str, directory: str | None, read: Callable[[Path, str], Any]
) -> Source:
    root = checked_directory(name, source, directory)
    train, test = (RowExamples(read(root, part)) for part in ("train", "test"))
    data = make_data_set(f"{name} {root}", train, test)
    return Source(name, spec_of(train), lambda: data)


def _files(root: Path, part: str, ending: str) -> list[Path]:
    files = sorted(root.glob(f"{part}*.{ending}"))
    if not files:
        raise DataError(f"{root}: no files {part}*.{ending}. They are needed; see data.dir.")
    return files


@contextlib.contextmanager
def _quiet_datasets() -> Iterator[Any]:
    """`datasets`, which shows no progress bars meanwhile: in a log each is a line of its own."""
    datasets = _library("datasets")
    # What its environment variable says stands: datasets would warn of every attempt.
    is_ours = datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS is None
    with contextlib.ExitStack() as afterwards:
        if is_ours and not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            afterwards.callback(datasets.enable_progress_bars)
        yield datasets


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"this data set needs {name}, which is not installed: pip install 'jddp[data]'."
        ) from error
