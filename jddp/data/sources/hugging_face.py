"""Rows that Hugging Face's library `datasets` reads: of the Hub, of files, tar files and streams.

    hugging_face(directory=Path("mnist"))     # of DatasetDict.save_to_disk, or a folder per split
    hugging_face(path="ylecun/mnist")         # downloaded once, into the cache of `datasets`
    hugging_face(path="ylecun/mnist", streaming=True)       # read while it trains, not kept
    parquet(directory=Path("rows"))           # train*.parquet and test*.parquet
    webdataset(directory=Path("tars"), image_size=64)       # train*.tar and test*.tar

Nothing but a name in the config downloads anything, and the code of a data set is never run:
`datasets` refuses scripts, and pickles too. It would decode images in any format of Pillow, though
some start programs, and download images that are only addresses. So images are decoded here from
their bytes, in the formats of image folders; sound, video and similar types are refused.

Samples in tar files are named as by WebDataset: cat/0001.jpg and cat/0001.cls are one sample. By
default it has an image and a class, `members={"image": "jpg;png", "label": "cls"}`. Other members
are not read, unless `members` names them: `{"x": "left.npy", "age": "json:age"}` for an array of
numbers, and for an entry of a JSON object. Labels are read at the start.
"""

import contextlib
import functools
import glob
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from jddp.data.batches import Share
from jddp.data.examples import Examples, NumpyBatch, RowExamples, in_32_bits
from jddp.data.source import (
    DataSource,
    Streams,
    make_data_set,
    parts_of,
    selected_parts,
    source_of,
    source_of_streams,
    spec_of,
)
from jddp.data.sources.arrays import files_of, import_extra, refusing_damage
from jddp.data.sources.images import (
    ENDINGS,
    MEAN,
    STD,
    TEST_MARGIN,
    check_image_arguments,
    decode_image,
    decode_images,
)
from jddp.data.transforms import CropAndFlip, Transformed, normalize
from jddp.ground.errors import ConfigError, DataError, Error, FileSystemError, printable
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


MEMBERS = {"image": ";".join(sorted(x.removeprefix(".") for x in ENDINGS)), "label": "cls"}
PLACE = ["__url__", "__key__"]  # columns with the tar file and the name of a sample


class SampleExamples:
    """Samples as examples: images of one size, labels, and other numbers.

    Args:
      rows: A `Dataset` of samples.
      image_size: Height and width of images, in pixels; None for samples without "image".
      margin: Fraction of the shorter side that is cropped, half of it on each side.
      keep_undecodable: Whether an image that does not decode becomes a black one of mask 0;
        without, it is an error.

    Raises:
      DataError: If labels are no whole numbers from 0 on, or need 64 bits.
    """

    def __init__(
        self, rows: Any, image_size: int | None, margin: float, *, keep_undecodable: bool
    ) -> None:
        others = [name for name in rows.column_names if name not in ("image", "label", *PLACE)]
        self._rows = rows.remove_columns(others).with_format("numpy")
        self._size, self._margin = image_size, margin
        self._masked: set[int] | None = set() if keep_undecodable else None
        self.labels = _labels(self._rows) if "label" in rows.column_names else None
        self._others = None
        if others:
            where = "tar files"
            self._others = StoredRows(*undecoded(rows.select_columns(others), where), where)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def files(self) -> list[str]:
        """The tar file and the name of each sample."""
        places = self._rows.select_columns(PLACE)[:]
        return [*map(_called, *(places[name] for name in PLACE))]

    def take(self, indices: np.ndarray) -> NumpyBatch:
        """The members by name: uint8 "image", int32 "label", and numbers in 32 bits.

        Raises:
          DataError: If a member cannot be read, or does not decode and may not be missing.
        """
        batch = {} if self._others is None else self._others.take(indices)
        if self._size is not None:
            numbers = indices.tolist()
            rows = dict(zip(numbers, self._rows.__getitems__(numbers), strict=True))
            batch |= decode_images(
                lambda index: self._decode(rows[index]), indices, self._size, masked=self._masked
            )
        return batch if self.labels is None else {**batch, "label": self.labels[indices]}

    def _decode(self, row: Row) -> np.ndarray:
        where = _called(*(row[name] for name in PLACE))
        return decode_image(row["image"]["bytes"], self._size, margin=self._margin, where=where)

    def fingerprint(self) -> str:
        """A hash of the names and the labels of all samples."""
        labels = b"" if self.labels is None else self.labels.tobytes()
        return sha256("\n".join(self.files).encode() + labels).hexdigest()


def _called(path: str, sample: str) -> str:
    return printable(f"{Path(path).name}: {sample}")


def _labels(rows: Any) -> np.ndarray:
    labels = np.asarray(rows.select_columns(["label"])[:]["label"])
    if labels.dtype.kind not in "iu" or labels.min() < 0:
        raise DataError(
            f"labels of tar files are {labels.dtype}, the first ones {labels[:4].tolist()}. They "
            "need whole numbers from 0; other numbers need another name: data.kwargs.members."
        )
    return in_32_bits("label", labels, range(len(labels)))


def webdataset(
    *,
    directory: Path,
    image_size: int | None = None,
    members: Mapping[str, str] = MEMBERS,
    num_classes: int | None = None,
    mean: float | Sequence[float] = MEAN,
    std: float | Sequence[float] = STD,
    undecodable: str = "error",
    test_share: float | None = None,
) -> DataSource:
    """The source of tar files in a directory.

    Args:
      directory: Folder of train*.tar and test*.tar; with `test_share`, of any tar files.
      image_size: Height and width, in pixels; needed with a member "image".
      members: Endings of the members of a sample, by the names of their arrays; of several endings
        all samples have the same one.
      num_classes: Number of classes; by default the largest label of the training part, plus 1.
      mean: Value to subtract from pixels over 255; one number, or one per channel.
      std: Divisor after that.
      undecodable: "error", or "mask": such an image is masked out, and named in the log.
      test_share: Fraction of the samples that are for testing; None if they are in files of their
        own.

    Raises:
      ConfigError: If an argument breaks its rule, or Pillow or `datasets` is not installed.
      DataError: If a file is missing or damaged, or a sample lacks a member.
    """
    if not isinstance(members, Mapping) or not members:
        raise ConfigError(
            f"data.kwargs.members: {members!r}. Give endings by names: {{image: jpg, label: cls}}."
        )
    is_of_images = "image" in members
    if is_of_images != (image_size is not None):
        raise ConfigError(
            f"data.kwargs.image_size={image_size}, and the members are {', '.join(members)}. A "
            "size is needed with 'image', and has no meaning without."
        )
    if is_of_images:
        check_image_arguments(mean, std, undecodable, needed_by="webdataset")

    def examples(rows: Any, margin: float) -> SampleExamples:
        return SampleExamples(rows, image_size, margin, keep_undecodable=undecodable == "mask")

    def scaled(part: SampleExamples) -> Examples:
        return Transformed(part, normalize(mean, std)) if is_of_images else part

    training, testing = selected_parts(
        lambda part: _rows(directory, part, members),
        test_share,
        lambda rows, indices: rows.select(indices),
    )
    train, test = examples(training, 0.0), examples(testing, TEST_MARGIN)
    digest = sha256((train.fingerprint() + test.fingerprint()).encode())
    data = make_data_set(
        f"webdataset {directory}", scaled(train), scaled(test), sha256_hex=digest.hexdigest()
    )
    augment = (CropAndFlip(),) if is_of_images else ()
    sizes = {}
    if train.labels is not None:
        sizes = {"num_classes": num_classes or int(train.labels.max()) + 1}
    return DataSource(spec_of(data.train), lambda: data, augment, sizes)


def _rows(directory: Path, part: str, members: Mapping[str, str]) -> Any:
    """The samples of a part in the order of the files, with a column for each array."""
    files = files_of(directory, part, ".tar")
    where = f"{directory}/{part}*.tar"
    with reading(where) as datasets:
        paths = [glob.escape(str(path)) for path in files]
        rows = datasets.load_dataset("webdataset", data_files=paths, split="train").flatten()
    columns = {_column(where, rows, name, text): name for name, text in members.items()}
    rows = rows.select_columns([*columns, *PLACE]).rename_columns(columns)
    if "image" not in members:
        return rows
    if not isinstance(rows.features["image"], datasets.Image):
        raise DataError(f"{where}: {members['image']} is no image. Give another member 'image'.")
    return rows.cast_column("image", datasets.Image(decode=False))


def _column(where: str, rows: Any, name: str, text: str) -> str:
    """The column of a member, which all samples have.

    Raises:
      DataError: If there is none with one of these endings, or several, or a sample has none.
    """
    endings, _, key = str(text).lower().partition(":")
    wanted = {f"{ending}.{key}" if key else ending for ending in endings.split(";")}
    columns = [column for column in rows.column_names if column.lower() in wanted]
    if len(columns) != 1:
        endings_there = ", ".join(column for column in rows.column_names if column not in PLACE)
        raise DataError(
            f"{where}: a sample has the members {printable(endings_there)}, and '{name}' is to be "
            f"one of {text}. A name ends at its first dot. Rename the members of all samples, or "
            "choose others: data.kwargs.members."
        )
    missing = np.flatnonzero(rows.data.column(columns[0]).is_null())
    if len(missing):
        row = rows.select_columns(PLACE)[int(missing[0])]
        raise DataError(
            f"{_called(*(row[name] for name in PLACE))} has no member {columns[0]}. Add it, or "
            "choose the members of all samples: data.kwargs.members."
        )
    return columns[0]
