"""Rows that Hugging Face's library `datasets` reads: of the Hub, of folders and files, of streams.

    hugging_face(directory=Path("mnist"))     # of DatasetDict.save_to_disk, or a folder per split
    hugging_face(path="ylecun/mnist")         # downloaded once, into the cache of `datasets`
    hugging_face(path="ylecun/mnist", streaming=True)       # read while it trains, not kept
    parquet(directory=Path("rows"))           # train*.parquet and test*.parquet

Nothing but a name in the config downloads anything, and the code of a data set is never run:
`datasets` refuses scripts, and pickles too. It would decode images in any format of Pillow, though
some start programs, and download images that are only addresses. So images are decoded here from
their bytes, in the formats of image folders; sound, video and similar types are refused.
"""

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jddp.data.batches import Share
from jddp.data.examples import NumpyBatch, RowExamples
from jddp.data.source import DataSource, Streams, parts_of, source_of, source_of_streams
from jddp.data.sources.files import files_of, import_extra, refusing_damage
from jddp.data.sources.images import decode_image
from jddp.ground.errors import ConfigError, DataError, Error, FileSystemError
from jddp.ground.names import resolve_target
from jddp.ground.typing import JsonObject

log = logging.getLogger("jddp")

Row = dict[str, Any]  # by the names of columns


def hugging_face(
    *,
    directory: Path | None = None,
    path: str | None = None,
    config: str | None = None,
    revision: str | None = None,
    train_split: str = "train",
    test_split: str = "test",
    columns: Sequence[str] | None = None,
    test_share: float | None = None,
    streaming: bool = False,
    shuffle_buffer: int | None = None,
) -> DataSource:
    """The source of a data set of Hugging Face.

    Args:
      directory: Folder that `DatasetDict.save_to_disk` has written, or one with a folder of
        `Dataset.save_to_disk` for each split.
      path: Name of a data set on the Hub, such as "ylecun/mnist", or a folder of files that
        `datasets.load_dataset` reads; in the place of a directory.
      config: Name of a configuration of the data set with this path.
      revision: Branch, tag or commit of the data set with this path.
      train_split: Name of the split for training.
      test_split: Name of the split for testing.
      columns: Columns to read; None for all.
      test_share: Fraction of the training split that is for testing in place of another split.
      streaming: Whether rows are read one after the other, in the order of the files.
      shuffle_buffer: Number of rows of a stream from which the next one is taken at random; None
        for their order.

    Raises:
      ConfigError: If there is not exactly one of directory and path, or an argument does not belong
        to streams, or to examples.
      DataError: If the data are absent or damaged, or the Hub cannot be reached.
    """
    _check_reading(streaming, test_share, shuffle_buffer)
    data = _Splits(directory, path, config, revision, columns)
    splits = {"train": train_split, "test": test_split}
    name = f"hugging_face {directory or path}"
    if not streaming:

        def read(part: str) -> StoredRows:
            where = data.where(splits[part])
            return StoredRows(*undecoded(data.load(splits[part]), where), where)

        return source_of(name, *parts_of(read, test_share))

    def stream(part: str, size: int, share: Share, **options: Any) -> RowStream:
        rows, where = data.load(splits[part], streaming=True), data.where(splits[part])
        if shuffle_buffer is not None and part == "train":
            return _shuffled(rows, where, size, share, shuffle_buffer, **options)
        return RowStream(*undecoded(rows, where), where, size, share, is_endless=part == "train")

    def open_streams(size: int, seed: int, share: Share) -> Streams:
        if size % share.num_processes:
            raise ConfigError(
                f"data.global_batch_size={size} does not divide over {share.num_processes} "
                "processes. Give a multiple."
            )
        train, test = stream("train", size, share, seed=seed), stream("test", size, share)
        return Streams(train, test, f"{name}, a stream")

    return source_of_streams(name, open_streams)


def _check_reading(streaming: bool, test_share: float | None, shuffle_buffer: int | None) -> None:
    """Refuses arguments that do not belong together."""
    if streaming and test_share is not None:
        raise ConfigError(
            f"data.kwargs.test_share={test_share} divides numbered examples, which a stream has "
            "not. Give train_split and test_split."
        )
    if shuffle_buffer is not None and not streaming:
        raise ConfigError(
            f"data.kwargs.shuffle_buffer={shuffle_buffer} is for data.kwargs.streaming=true. "
            "Without it data.shuffle shuffles all examples."
        )
    if shuffle_buffer is not None and shuffle_buffer < 1:
        raise ConfigError(
            f"data.kwargs.shuffle_buffer={shuffle_buffer} holds no row. Give 1 or more, or null."
        )


@dataclass(frozen=True)
class _Splits:
    """The splits of a data set: folders in a directory, or what `datasets` finds by its path."""

    directory: Path | None
    path: str | None
    config: str | None
    revision: str | None
    columns: Sequence[str] | None

    def __post_init__(self) -> None:
        if (self.directory is None) == (self.path is None):
            raise ConfigError(
                "data.name=hugging_face reads a folder, data.dir, or a data set of the Hub by "
                "name, data.kwargs.path. Give one of the two."
            )
        for name in ("config", "revision") if self.path is None else ():
            if (value := getattr(self, name)) is not None:
                raise ConfigError(
                    f"data.kwargs.{name}={value} belongs to data.kwargs.path. Leave it out: the "
                    "folder data.dir holds what was saved."
                )

    def where(self, split: str) -> str:
        """Name of a split, for errors."""
        return f"{self.directory}/{split}" if self.path is None else f"{self.path}, split {split}"

    def load(self, split: str, *, streaming: bool = False) -> Any:
        """The rows of a split: a `Dataset`, or an `IterableDataset`."""
        where = self.where(split)
        rows = self._saved(split, where) if self.path is None else self._named(split, streaming)
        if streaming and self.path is None:
            rows = rows.to_iterable_dataset()
        if self.columns is None:
            return rows
        with reading(where, "See data.kwargs.columns."):
            return rows.select_columns(list(self.columns))

    def _saved(self, split: str, where: str) -> Any:
        assert self.directory is not None
        if not (self.directory / split).is_dir():
            names = sorted(x.parent.name for x in self.directory.glob("*/state.json"))
            splits = f"The splits there are: {', '.join(names)}. " if names else ""
            raise DataError(f"{where}: no such folder. {splits}It is needed; see data.dir.")
        with reading(where) as datasets:
            rows = datasets.load_from_disk(where)
            # Arrow aborts at places outside of their array. This check reads no numbers.
            rows.data.validate(full=True)
            return rows

    def _named(self, split: str, streaming: bool) -> Any:
        names = "path, config, revision, train_split, test_split"
        options = {"split": split, "revision": self.revision, "streaming": streaming}
        with reading(self.where(split), f"See data.kwargs: {names}.") as datasets:
            try:
                return datasets.load_dataset(self.path, self.config, **options)
            except ConnectionError as error:
                arguments = [repr(x) for x in (self.path, self.config) if x is not None]
                arguments += [f"revision={self.revision!r}"] if self.revision is not None else []
                raise DataError(
                    f"{self.where(split)}: {_line(error)}. Load it once where there is a network, "
                    'with the same HF_HOME: python -c "import datasets; '
                    f'datasets.load_dataset({", ".join(arguments)})"; or give a folder of '
                    "DatasetDict.save_to_disk as data.dir."
                ) from error


@contextlib.contextmanager
def reading(where: object, way_out: str = "Write it again.") -> Iterator[Any]:
    """The library `datasets`, quiet while this is open; what it raises becomes one line.

    Args:
      where: Name of the data.
      way_out: Last sentence of an error about them.

    Raises:
      DataError: If they are absent or damaged.
      FileSystemError: If the cache of `datasets` cannot be written.
    """
    datasets = import_extra("datasets", needed_by="this data set")
    with contextlib.ExitStack() as afterwards:
        # Its environment variable has precedence: datasets would warn of every attempt.
        is_ours = datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS is None
        if is_ours and not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            afterwards.callback(datasets.enable_progress_bars)
        for name in ("datasets", "huggingface_hub"):  # which log errors that are raised too
            logger = logging.getLogger(name)
            afterwards.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        try:
            yield datasets
        except Error:
            raise
        except Exception as error:  # damaged files can raise anything
            causes = [*_causes(error)]
            if full := [x for x in causes if _is_of_files(x)]:  # no home, or a full one
                raise FileSystemError(
                    f"{where}: datasets cannot cache these files: {full[0]}. Set HF_HOME to a "
                    "folder for them."
                ) from error
            wrapper = datasets.exceptions.DatasetGenerationError
            reasons = [x for x in causes if not isinstance(x, wrapper)]
            raise DataError(f"{where}: {_line([*reasons, error][0])}. {way_out}") from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and the errors before it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_of_files(error: BaseException) -> bool:
    others = (ConnectionError, TimeoutError, FileNotFoundError)
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, others)


def _line(error: BaseException) -> str:
    """The first line of an error, or its name."""
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def parquet(
    *, directory: Path, columns: Sequence[str] | None = None, test_share: float | None = None
) -> DataSource:
    """The source of Parquet files in a directory, with these columns (None for all)."""

    def read(part: str) -> StoredRows:
        files = [str(path) for path in files_of(directory, part, ".parquet")]
        where = f"{directory}/{part}*.parquet"
        with reading(where) as datasets:
            arrow = import_extra("pyarrow.parquet", needed_by="parquet")
            for file in files:
                with refusing_damage(file, "Parquet file"):
                    arrow.read_metadata(file)
            rows = datasets.Dataset.from_parquet(files, keep_in_memory=False, columns=columns)
        return StoredRows(*undecoded(rows, where), where)

    return source_of(f"parquet {directory}", *parts_of(read, test_share))


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
        return StoredRows(records, function, where)

    return source_of(f"array_record {directory}", *parts_of(read, test_share))


class StoredRows(RowExamples):
    """Examples of rows that a library reads from files, and a function then decodes.

    Args:
      rows: Object with `__len__` and `__getitem__`; `__getitems__`, if any, reads many at once.
      decode: Function from one of them to a row; what it raises is its own.
      where: Name of the files, for errors.
    """

    def __init__(self, rows: Any, decode: Callable[[Any], Row], where: str) -> None:
        super().__init__(rows)
        self._decode, self._where = decode, where

    def column(self, name: str) -> np.ndarray | None:
        """A column of all rows, if they are stored by columns."""
        if name not in getattr(self._rows, "column_names", ()):
            return None
        return np.asarray(self._rows.select_columns([name])[:][name])

    def _rows_at(self, indices: list[int]) -> Iterable[Row]:
        with refusing_damage(self._where, "file of rows"):
            stored = list(super()._rows_at(indices))
        return [self._decode(row) for row in stored]


def undecoded(rows: Any, where: str) -> tuple[Any, Callable[[Row], Row]]:
    """Rows as arrays, with images as they are stored; and the function that decodes these.

    Args:
      rows: A `Dataset` or an `IterableDataset`.
      where: Name of the rows, for errors.

    Raises:
      DataError: If a column holds another type that would be decoded.
    """
    datasets = import_extra("datasets", needed_by="this data set")
    modes: dict[str, str | None] = {}
    for name, feature in (rows.features or {}).items():  # of a stream they may be unknown
        if isinstance(feature, datasets.Image):
            import_extra("PIL", needed_by=f"column {name!r}")
            modes[name] = feature.mode
            rows = rows.cast_column(name, datasets.Image(mode=feature.mode, decode=False))
        elif datasets.features.features.require_decoding(feature):
            raise DataError(
                f"{where}: column {name!r} is {type(feature).__name__}, which is not decoded. "
                "Leave it out: data.kwargs.columns."
            )
    return rows.with_format("numpy"), functools.partial(_with_images, where=where, modes=modes)


def _with_images(row: Row, *, where: str, modes: Mapping[str, str | None]) -> Row:
    """A row with images as uint8, `(height, width)` or `(height, width, channels)`."""
    images = {}
    for name, mode in modes.items():
        stored, here = row[name], f"{where}: an image of column {name!r}"
        if stored is None or stored["bytes"] is None:
            raise DataError(f"{here} is only a path, which is not read. Embed its bytes.")
        images[name] = decode_image(stored["bytes"], mode=mode, where=here)
    return row | images


@dataclass(eq=False)
class RowStream:
    """Batches of rows that are read one after the other: one pass, or one epoch after the other.

    Global batches are consecutive rows, and each process takes its part of them: the rows, and the
    position after them, are the same for any number of processes. A batch of an endless stream may
    hold rows of two epochs; the last batch of one pass may be smaller.

    Attributes:
      rows: An `IterableDataset`, which knows its position and its epoch.
      decode: Function from a row as it is read to a row.
      where: Name of the rows, for errors.
      size: Number of rows of a batch of all processes that read these rows.
      share: Part of each batch that this process takes.
      is_endless: Whether an epoch follows the other.
      num_divisions: Number of processes among which rows are divided that are shuffled in a buffer;
        0 for all rows in their order.
    """

    rows: Any
    decode: Callable[[Row], Row]
    where: str
    size: int
    share: Share
    is_endless: bool = False
    num_divisions: int = 0
    _epoch: int = 0
    _is_reported: bool = False

    @property
    def resumes_exactly(self) -> bool:
        """Whether the next row is at the position; rows in a buffer are left out."""
        return not self.num_divisions

    def __iter__(self) -> Iterator[NumpyBatch]:
        if not (self.resumes_exactly or self._is_reported):
            self._is_reported = True
            log.warning(
                "%s is shuffled in a buffer, whose rows are left out when a run resumes: it does "
                "not resume exactly.",
                self.where,
            )
        begin, end = self.share.part_of(self.size)
        rows = self._without_end() if self.is_endless else iter(self.rows)
        while together := self._next(rows):
            part = together[begin:end]
            decoded = [self.decode(row) for row in part or together[:1]]  # for the dtypes
            yield RowExamples(decoded).take(np.arange(len(part)))

    def _next(self, rows: Iterator[Row]) -> list[Row]:
        with refusing_damage(self.where, "stream of rows"):
            return list(itertools.islice(rows, self.size))

    def _without_end(self) -> Iterator[Row]:
        begins_at = self._epoch
        for self._epoch in itertools.count(begins_at):
            is_empty = True
            for row in self.rows:
                is_empty = False
                yield row
            if is_empty and self._epoch > begins_at:
                raise DataError(f"{self.where}: no rows. At least one is needed.")
            self.rows.load_state_dict({})  # else each pass would begin where this one did
            # By the number of the epoch `datasets` would shuffle the files; 0 keeps their order.
            self.rows.set_epoch(0 if self.resumes_exactly else self._epoch + 1)

    def state_dict(self) -> JsonObject:
        """The position after the last batch, and the division of the rows."""
        division = {"num_processes": self.num_divisions} if self.num_divisions else {}
        return {"epoch": self._epoch, "rows": self.rows.state_dict(), **division}

    def load_state_dict(self, state: JsonObject) -> None:
        """Moves to a position, for the next iterator.

        Rows that were divided among another number of processes begin with the next epoch.
        """
        before = state.get("num_processes", self.num_divisions)
        if before == self.num_divisions:
            self._epoch = state["epoch"]
            self.rows.load_state_dict(state["rows"])
            self.rows.set_epoch(state["rows"]["epoch"])
            return
        self._epoch = state["epoch"] + 1
        self.rows.set_epoch(self._epoch)
        log.warning(
            "%s was read by %d processes and now is by %d, which divide its rows in another way: "
            "it begins with the next epoch.",
            self.where,
            before,
            self.num_divisions,
        )


def _shuffled(
    rows: Any, where: str, size: int, share: Share, shuffle_buffer: int, *, seed: int
) -> RowStream:
    """A stream of rows in a random order; each process reads rows of its own."""
    distributed = import_extra("datasets.distributed", needed_by="a shuffled stream")
    shuffled = rows.shuffle(seed=seed, buffer_size=shuffle_buffer)
    divided = distributed.split_dataset_by_node(shuffled, *share)
    num = share.num_processes
    whole = Share(0, 1)
    return RowStream(
        *undecoded(divided, where), where, size // num, whole, is_endless=True, num_divisions=num
    )
