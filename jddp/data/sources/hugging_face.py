"""Rows that Hugging Face's library `datasets` reads: from the Hub, files, tar files and streams.

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
numbers, and for an entry of a JSON object.
"""

import contextlib
import functools
import glob
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from jddp.data.batches import Share
from jddp.data.examples import NumpyBatch, RowExamples
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
    image_or_mask,
)
from jddp.data.transforms import CropAndFlip, Transformed, normalize
from jddp.ground.errors import ConfigError, DataError, Error, FileSystemError, printable
from jddp.ground.typing import JsonObject

log = logging.getLogger("jddp")

Row = Mapping[str, object]  # Values by the names of columns.


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
    if (directory is None) == (path is None) or (path is None and (config or revision)):
        raise ConfigError(
            "data.name=hugging_face reads a folder, data.dir, or a data set of the Hub by name, "
            "data.kwargs.path, of which config and revision are. Give one of the two."
        )
    if streaming and test_share is not None:
        raise ConfigError(
            f"data.kwargs.test_share={test_share} divides numbered examples, which a stream has "
            "not. Give train_split and test_split."
        )
    if shuffle_buffer is not None and not (streaming and shuffle_buffer > 0):
        raise ConfigError(
            f"data.kwargs.shuffle_buffer={shuffle_buffer} needs data.kwargs.streaming=true and a "
            "row or more. Without streaming data.shuffle shuffles all examples."
        )

    def load(part: str) -> tuple[Any, str]:
        split = {"train": train_split, "test": test_split}[part]
        if path is None:
            where = f"{directory}/{split}"
            saved = sorted(x.parent.name for x in Path(f"{directory}").glob("*/state.json"))
            way_out = f"See data.dir; its splits are: {', '.join(saved)}."
        else:
            where = f"{path}, split {split}"
            way_out = "See data.kwargs: path, config, revision, train_split, test_split, columns."
        with reading(where, way_out) as datasets:
            if path is None:
                rows = datasets.load_from_disk(where)
                # Arrow aborts at places outside of their array. This check reads no numbers.
                rows.data.validate(full=True)
                rows = rows.to_iterable_dataset() if streaming else rows
            else:
                options = {"split": split, "revision": revision, "streaming": streaming}
                rows = datasets.load_dataset(path, config, **options)
            return rows if columns is None else rows.select_columns([*columns]), where

    name = f"hugging_face {directory or path}"
    if not streaming:
        return source_of(name, *parts_of(lambda part: StoredRows(*load(part)), test_share))

    def open_streams(size: int, seed: int, share: Share) -> Streams:
        if size % share.num_processes:
            raise ConfigError(
                f"data.global_batch_size={size} does not divide over {share.num_processes} "
                "processes. Give a multiple."
            )
        train = RowStream(
            *load("train"), size, share, is_endless=True, buffer=shuffle_buffer, seed=seed
        )
        return Streams(train, RowStream(*load("test"), size, share), f"{name}, a stream")

    return source_of_streams(name, open_streams)


@contextlib.contextmanager
def reading(where: object, way_out: str = "Write it again.") -> Iterator[Any]:
    """The library `datasets`, quiet while this is open; its errors become one line.

    Args:
      where: Name of the data.
      way_out: Last sentence of an error about them.

    Raises:
      DataError: If they are absent or damaged.
      FileSystemError: If the cache of `datasets` cannot be written.
    """
    datasets = import_extra("datasets", needed_by="this data set")
    with contextlib.ExitStack() as afterwards:
        if not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            afterwards.callback(datasets.enable_progress_bars)
        for name in ("datasets", "huggingface_hub"):  # They also log the errors that they raise.
            logger = logging.getLogger(name)
            afterwards.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        try:
            yield datasets
        except Error:
            raise
        except Exception as error:  # damaged files can raise anything
            raise _refusal(error, where, way_out) from error


def _refusal(error: BaseException, where: object, way_out: str) -> Error:
    """The error in one line, by the reason that `datasets` may have wrapped."""
    reasons = [error]
    while (before := reasons[-1].__cause__ or reasons[-1].__context__) is not None:
        reasons.append(before)
    absent = (ConnectionError, TimeoutError, FileNotFoundError)
    for reason in reasons:  # The home folder is missing, or full.
        if isinstance(reason, OSError) and reason.errno and not isinstance(reason, absent):
            return FileSystemError(
                f"{where}: datasets cannot cache these files: {reason}. Set HF_HOME to a folder "
                "for them."
            )
    if isinstance(error, ConnectionError):
        way_out = (
            "Call datasets.load_dataset once where there is a network, with the same HF_HOME; or "
            "give a folder of DatasetDict.save_to_disk as data.dir."
        )
    wrapper = "DatasetGenerationError"
    reason = next((x for x in reasons if type(x).__name__ != wrapper), error)
    line = str(reason).partition("\n")[0].rstrip(".") or type(reason).__name__
    return DataError(f"{where}: {line}. {way_out}")


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
        return StoredRows(rows, where)

    return source_of(f"parquet {directory}", *parts_of(read, test_share))


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
    for name, feature in (rows.features or {}).items():  # A stream may not know them.
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
    for name in modes.keys() & row.keys():
        stored, here = row[name], f"{where}: an image of column {name!r}"
        if not isinstance(stored, dict) or stored["bytes"] is None:
            raise DataError(f"{here} is only a path, which is not read. Embed its bytes.")
        images[name] = decode_image(stored["bytes"], mode=modes[name], where=here)
    return {**row, **images}


class StoredRows(RowExamples):
    """Examples of the rows of a `Dataset`, which are decoded here.

    Args:
      rows: The rows.
      where: Name of the rows, for errors.
    """

    def __init__(self, rows: Any, where: str) -> None:
        stored, self._decode = undecoded(rows, where)
        super().__init__(stored)
        self._where = where

    def column(self, name: str) -> np.ndarray | None:
        """A column of all rows."""
        if name not in self._rows.column_names:
            return None
        return np.asarray(self._rows.select_columns([name])[:][name])

    def _rows_at(self, indices: list[int]) -> Iterable[Row]:
        with refusing_damage(self._where, "file of rows"):
            stored = self._rows.__getitems__(indices)
        return [self._row(row) for row in stored]

    def _row(self, row: Row) -> Row:
        return self._decode(row)


class RowStream:
    """Batches of rows that are read one after the other: one pass, or one epoch after the other.

    Global batches are consecutive rows, and each process takes its part of them: the rows, and the
    position after them, are the same for any number of processes. A batch of an endless stream may
    hold rows of two epochs; the last batch of one pass may be smaller. Rows that are shuffled in a
    buffer are divided among the processes.

    Attributes:
      resumes_exactly: Whether the next row is at the position; rows in a buffer are left out.
    """

    def __init__(
        self,
        rows: Any,
        where: str,
        size: int,
        share: Share,
        *,
        is_endless: bool = False,
        buffer: int | None = None,
        seed: int = 0,
    ) -> None:
        """Begins before the first row.

        Args:
          rows: An `IterableDataset`, which knows its position and its epoch.
          where: Name of the rows, for errors.
          size: Number of rows of a global batch.
          share: Part of each batch that this process takes.
          is_endless: Whether an epoch follows the other.
          buffer: Number of rows from which the next one is taken at random; None for their order.
          seed: Seed of the random order.
        """
        self.resumes_exactly = buffer is None
        self._num_divisions = 0
        if buffer is not None:
            from datasets.distributed import split_dataset_by_node

            rows = rows.shuffle(seed=seed, buffer_size=buffer)
            rows = split_dataset_by_node(rows, *share)
            self._num_divisions = share.num_processes
            size, share = size // share.num_processes, Share(0, 1)
            log.warning(
                "%s is shuffled in a buffer, whose rows are left out when a run resumes: it does "
                "not resume exactly.",
                where,
            )
        self._rows, self._decode = undecoded(rows, where)
        self._where, self._size, self._part = where, size, share.part_of(size)
        self._is_endless = is_endless
        self._epoch = 0

    def __iter__(self) -> Iterator[NumpyBatch]:
        begin, end = self._part
        rows = self._without_end() if self._is_endless else iter(self._rows)
        while together := self._next(rows):
            part = together[begin:end]
            # Without a row of its own the process decodes one for the dtypes.
            decoded = [self._decode(row) for row in part or together[:1]]
            yield RowExamples(decoded).take(np.arange(len(part)))

    def _next(self, rows: Iterator[Row]) -> list[Row]:
        with refusing_damage(self._where, "stream of rows"):
            return list(itertools.islice(rows, self._size))

    def _without_end(self) -> Iterator[Row]:
        begins_at = self._epoch
        for self._epoch in itertools.count(begins_at):
            is_empty = True
            for row in self._rows:
                is_empty = False
                yield row
            if is_empty and self._epoch > begins_at:
                raise DataError(f"{self._where}: no rows. At least one is needed.")
            self._rows.load_state_dict({})  # Without it, each pass would begin where this one did.
            # `datasets` would shuffle the files by the number of the epoch; 0 keeps their order.
            self._rows.set_epoch(0 if self.resumes_exactly else self._epoch + 1)

    def state_dict(self) -> JsonObject:
        """The position after the last batch, and the division of the rows."""
        division = {"num_processes": self._num_divisions} if self._num_divisions else {}
        return {"epoch": self._epoch, "rows": self._rows.state_dict(), **division}

    def load_state_dict(self, state: JsonObject) -> None:
        """Moves to a position, for the next iterator.

        Rows that were divided among another number of processes begin with the next epoch.
        """
        self._epoch = state["epoch"]
        if state.get("num_processes", self._num_divisions) == self._num_divisions:
            self._rows.load_state_dict(state["rows"])
            self._rows.set_epoch(state["rows"]["epoch"])
            return
        log.warning(
            "%s was divided among another number of processes: it begins with the next epoch.",
            self._where,
        )
        self._epoch += 1
        self._rows.set_epoch(self._epoch)


MEMBERS = {"image": ";".join(sorted(x.removeprefix(".") for x in ENDINGS)), "label": "cls"}
PLACE = ["__url__", "__key__"]  # columns with the tar file and the name of a sample


class SampleExamples(StoredRows):
    """Samples of tar files as examples: images of one size, labels, and other numbers.

    Args:
      rows: A `Dataset` of samples.
      where: Name of the tar files, for errors.
      size: Height and width of images, in pixels; None for samples without "image".
      margin: Fraction of the shorter side that is cropped, half of it on each side.
      masked: Names of the images so far that do not decode; None if all must.
    """

    def __init__(
        self, rows: Any, where: str, size: int | None, margin: float, masked: set[str] | None
    ) -> None:
        super().__init__(rows, where)
        self._size, self._margin, self._masked = size, margin, masked

    @property
    def files(self) -> list[str]:
        """The tar file and the name of each sample."""
        places = self._rows.select_columns(PLACE)[:]
        return [*map(_called, *(places[name] for name in PLACE))]

    def fingerprint(self) -> str:
        """A hash of the names and the labels of all samples."""
        labels = self.column("label")
        numbers = b"" if labels is None else labels.astype(np.int32).tobytes()
        return sha256("\n".join(self.files).encode() + numbers).hexdigest()

    def _row(self, row: Row) -> Row:
        rest = self._decode({x: y for x, y in row.items() if x not in ("image", *PLACE)})
        if self._size is None:
            return rest
        where, image = _called(*(str(row[name]) for name in PLACE)), row["image"]
        assert isinstance(image, dict)
        found = image_or_mask(
            image["bytes"], self._size, self._margin, where=where, masked=self._masked
        )
        return {**found, **rest}


def _called(path: str, sample: str) -> str:
    return printable(f"{Path(path).name}: {sample}")


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
    parts = selected_parts(
        lambda part: _rows(directory, part, members),
        test_share,
        lambda rows, indices: rows.select(indices),
    )
    masked: set[str] | None = set() if undecodable == "mask" else None
    train, test = (
        SampleExamples(rows, f"{directory}/*.tar", image_size, margin, masked)
        for rows, margin in zip(parts, (0.0, TEST_MARGIN), strict=True)
    )
    scaled = [Transformed(x, normalize(mean, std)) if is_of_images else x for x in (train, test)]
    digest = sha256((train.fingerprint() + test.fingerprint()).encode())
    data = make_data_set(f"webdataset {directory}", *scaled, sha256_hex=digest.hexdigest())
    spec, labels = spec_of(data.train), train.column("label")
    sizes = {} if labels is None else {"num_classes": num_classes or int(labels.max()) + 1}
    return DataSource(spec, lambda: data, (CropAndFlip(),) if is_of_images else (), sizes)


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
