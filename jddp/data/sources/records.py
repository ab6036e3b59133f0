"""Files read by other libraries: Parquet by Hugging Face's `datasets`, ArrayRecord by grain.

- `parquet`: train*.parquet and test*.parquet;
- `array_record`: train*.array_record and test*.array_record, with a function that makes a dict of
  arrays from the bytes of a record.

With `test_share=0.2` this share of the training part is for testing, and no other is read. All need
the extra jddp[data]. Columns that hold anything but numbers are refused, unless `columns` leaves
them out.
"""

from collections.abc import Sequence
from pathlib import Path

from jddp.data.extras import import_extra
from jddp.data.source import DataSource, source_of_parts
from jddp.data.sources.datasets_library import caching, quiet_datasets
from jddp.data.sources.decoded_rows import StoredRows, decoded_rows
from jddp.data.sources.mapped import files_of, refusing_damage
from jddp.errors import DataError, Error
from jddp.names import resolve_target


def parquet(
    *, directory: Path, columns: Sequence[str] | None = None, test_share: float | None = None
) -> DataSource:
    """The source of Parquet files in a directory, with these columns (None for all)."""

    def read(part: str) -> StoredRows:
        files = [str(path) for path in files_of(directory, part, ".parquet")]
        where = f"{directory}/{part}*.parquet"
        try:
            with quiet_datasets() as datasets, caching(directory):
                rows = datasets.Dataset.from_parquet(files, keep_in_memory=False, columns=columns)
        except Error:
            raise
        except Exception:  # damaged files can raise anything
            arrow = import_extra("pyarrow.parquet", needed_by="parquet")
            for path in files:  # the first that is incomplete
                with refusing_damage(path, "Parquet file"):
                    arrow.read_table(path)
            with refusing_damage(where, "Parquet file"):
                raise
        return decoded_rows(rows, where)

    return source_of_parts(f"parquet {directory}", read, test_share)


def array_record(*, directory: Path, decode: str, test_share: float | None = None) -> DataSource:
    """The source of ArrayRecord files; the target `decode` makes a row from a record's bytes."""

    def read(part: str) -> StoredRows:
        grain = import_extra("grain", needed_by="array_record")
        files = [str(path) for path in files_of(directory, part, ".array_record")]
        where = f"{directory}/{part}*.array_record"
        function = resolve_target(decode, key="data.kwargs.decode")
        with refusing_damage(where, "ArrayRecord file"):
            records = grain.sources.ArrayRecordDataSource(files)
            num_records = len(records)
        if not num_records:
            raise DataError(f"{where}: no records. Write some.")
        return StoredRows(records, where, function)

    return source_of_parts(f"array_record {directory}", read, test_share)
