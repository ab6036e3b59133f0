"""Rows that Hugging Face's library `datasets` reads: from the Hub, files, tar files and streams.

    hugging_face(directory=Path("mnist"))     # of DatasetDict.save_to_disk, or a folder per split
    hugging_face(path="ylecun/mnist")         # downloaded once, into the cache of `datasets`
    hugging_face(path="rows")                 # a folder of Parquet, CSV or JSON files
    hugging_face(path="ylecun/mnist", streaming=True)       # read while it trains, not kept
    webdataset(directory=Path("tars"), image_size=64)       # train*.tar and test*.tar

Nothing but a name in the config downloads anything, and the code of a data set is never run:
`datasets` refuses scripts, and pickles too. It would decode images in any format of Pillow, though
some start programs, and download images that are only addresses. So images are decoded here from
their bytes, in the formats of image folders; sound, video and similar types are refused.

Samples in tar files are named as by WebDataset: cat/0001.jpg and cat/0001.cls are one sample. It
has an image and a class; other members are not read.
"""

import functools
import glob
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from jddp.data import source
from jddp.data.batches import Share
from jddp.data.examples import NumpyBatch, RowExamples
from jddp.data.sources.arrays import check_per_channel, files_of, import_extra, refusing_damage
from jddp.data.sources.images import MEAN, STD, TEST_MARGIN, decode_image
from jddp.data.transforms import CropAndFlip, Transformed, normalize
from jddp.ground.errors import ConfigError, DataError, printable
from jddp.ground.typing import JsonObject

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
) -> source.DataSource:
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

    Raises:
      ConfigError: If there is not exactly one of directory and path, or a stream is to be divided
        by `test_share`.
      DataError: If the data are absent or damaged, or the Hub cannot be reached.
    """
    if (directory is None) == (path is None):
        raise ConfigError(
            "data.name=hugging_face reads a folder, data.dir, or a data set of the Hub by name, "
            "data.kwargs.path. Give one of the two."
        )
    if streaming and test_share is not None:
        raise ConfigError(
            f"data.kwargs.test_share={test_share} divides numbered examples, which a stream has "
            "not. Give train_split and test_split."
        )
    datasets = import_extra("datasets", needed_by="data.name=hugging_face")

    def load(part: str) -> tuple[Any, str]:
        split = {"train": train_split, "test": test_split}[part]
        where = f"{directory}/{split}" if path is None else f"{path}, split {split}"
        try:
            if path is None:
                rows = datasets.load_from_disk(where)
                # Arrow aborts at places outside of their array. This check reads no numbers.
                rows.data.validate(full=True)
                rows = rows.to_iterable_dataset() if streaming else rows
            else:
                options = {"split": split, "revision": revision, "streaming": streaming}
                rows = datasets.load_dataset(path, config, **options)
            return rows if columns is None else rows.select_columns([*columns]), where
        except Exception as error:  # Damaged files can raise anything.
            reason = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
            raise DataError(
                f"{where}: {reason or type(error).__name__}. See data.dir and data.kwargs. A data "
                "set of the Hub needs a network, or its files in the cache of datasets (HF_HOME)."
            ) from error

    name = f"hugging_face {directory or path}"
    if not streaming:
        return source.source_of(
            name, *source.parts_of(lambda part: StoredRows(*load(part)), test_share)
        )

    def open_streams(size: int, seed: int, share: Share) -> source.Streams:
        train = RowStream(*load("train"), size, share, is_endless=True)
        return source.Streams(train, RowStream(*load("test"), size, share), f"{name}, a stream")

    return source.source_of_streams(name, open_streams)


def undecoded(
    rows: Any, where: str, size: int | None = None, margin: float = 0.0
) -> tuple[Any, Callable[[Row], Row]]:
    """Rows as arrays, with images as they are stored; and the function that decodes these.

    Args:
      rows: A `Dataset` or an `IterableDataset`.
      where: Name of the rows, for errors.
      size: Height and width of decoded images, in pixels; None to keep their sizes.
      margin: Fraction of the shorter side that is cropped, half of it on each side.

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
    decode = functools.partial(_decoded, where=where, modes=modes, size=size, margin=margin)
    return rows.with_format("numpy"), decode


def _decoded(
    row: Row, *, where: str, modes: Mapping[str, str | None], size: int | None, margin: float
) -> Row:
    """A row without its place, and with images as uint8."""
    decoded = {name: x for name, x in row.items() if name not in PLACE}
    for name in modes.keys() & row.keys():
        stored = row[name]
        here = _place(row) if PLACE[0] in row else f"{where}: an image of column {name!r}"
        if not isinstance(stored, dict) or stored["bytes"] is None:
            raise DataError(f"{here} is only a path, which is not read. Embed its bytes.")
        decoded[name] = decode_image(
            stored["bytes"], size, margin=margin, mode=modes[name], where=here
        )
    return decoded


PLACE = ["__url__", "__key__"]  # columns with the tar file and the name of a sample


def _place(row: Row) -> str:
    path, sample = (str(row[name]) for name in PLACE)
    return printable(f"{Path(path).name}: {sample}")


class StoredRows(RowExamples):
    """Examples of the rows of a `Dataset`, which are decoded here.

    Args:
      rows: The rows.
      where: Name of the rows, for errors.
      size: Height and width of images, in pixels; None to keep their sizes.
      margin: Fraction of the shorter side that is cropped, half of it on each side.
    """

    def __init__(self, rows: Any, where: str, size: int | None = None, margin: float = 0.0) -> None:
        stored, self._decode = undecoded(rows, where, size, margin)
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
        return map(self._decode, stored)


class RowStream:
    """Batches of rows that are read one after the other: one pass, or one epoch after the other.

    Global batches are consecutive rows, and each process takes its part of them: the rows, and the
    position after them, are the same for any number of processes. A batch of an endless stream may
    hold rows of two epochs; the last batch of one pass may be smaller.

    Args:
      rows: An `IterableDataset`, which knows its position and its epoch.
      where: Name of the rows, for errors.
      size: Number of rows of a global batch.
      share: Part of each batch that this process takes.
      is_endless: Whether an epoch follows the other.
    """

    def __init__(
        self, rows: Any, where: str, size: int, share: Share, *, is_endless: bool = False
    ) -> None:
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
            self._rows.set_epoch(0)

    def state_dict(self) -> JsonObject:
        """The position after the last batch."""
        return {"epoch": self._epoch, "rows": self._rows.state_dict()}

    def load_state_dict(self, state: JsonObject) -> None:
        """Moves to a position, for the next iterator."""
        self._epoch = state["epoch"]
        self._rows.load_state_dict(state["rows"])


def webdataset(
    *,
    directory: Path,
    image_size: int,
    num_classes: int | None = None,
    mean: float | Sequence[float] = MEAN,
    std: float | Sequence[float] = STD,
    test_share: float | None = None,
) -> source.DataSource:
    """The source of tar files in a directory.

    Args:
      directory: Folder of train*.tar and test*.tar; with `test_share`, of any tar files.
      image_size: Height and width, in pixels.
      num_classes: Number of classes; by default the largest label of the training part, plus 1.
      mean: Value to subtract from pixels over 255; one number, or one per channel.
      std: Divisor after that.
      test_share: Fraction of the samples that are for testing; None if they are in files of their
        own.

    Raises:
      ConfigError: If an argument breaks its rule, or Pillow or `datasets` is not installed.
      DataError: If a file is missing or damaged, or a sample lacks a member.
    """
    check_per_channel(mean, std, 3)
    parts = source.selected_parts(
        lambda part: _samples(directory, part),
        test_share,
        lambda rows, indices: rows.select(indices),
    )
    train, test = (
        StoredRows(rows, f"{directory}/*.tar", image_size, margin)
        for rows, margin in zip(parts, (0.0, TEST_MARGIN), strict=True)
    )
    scaling, digests = normalize(mean, std), ""
    for rows in parts:  # by names and labels
        names = "\n".join(map(_place, rows.select_columns(PLACE)))
        labels = np.asarray(rows["label"]).astype(np.int32)
        digests += sha256(names.encode() + labels.tobytes()).hexdigest()
    data = source.make_data_set(
        f"webdataset {directory}",
        Transformed(train, scaling),
        Transformed(test, scaling),
        sha256_hex=sha256(digests.encode()).hexdigest(),
    )
    sizes = {"num_classes": num_classes or int(np.asarray(train.column("label")).max()) + 1}
    return source.DataSource(source.spec_of(data.train), lambda: data, (CropAndFlip(),), sizes)


def _samples(directory: Path, part: str) -> Any:
    """The samples of a part in the order of the files, as rows of an image and a label."""
    datasets = import_extra("datasets", needed_by="webdataset")
    where = f"{directory}/{part}*.tar"
    paths = [glob.escape(str(path)) for path in files_of(directory, part, ".tar")]
    with refusing_damage(where, "set of tar files"):
        rows = datasets.load_dataset("webdataset", data_files=paths, split="train")
    images = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    columns = dict(zip([*images, "cls"], ["image", "label"], strict=False))
    num_missing = [rows.data.column(x).null_count for x in columns if x in rows.column_names]
    if len(images) != 1 or len(num_missing) != 2 or any(num_missing):
        members = ", ".join(name for name in rows.column_names if name not in PLACE)
        raise DataError(
            f"{where}: samples have the members {printable(members)}. Each needs one image and a "
            "class, cls, and all images one ending; a name ends at its first dot. Rename them."
        )
    rows = rows.select_columns([*columns, *PLACE]).rename_columns(columns)
    return rows.cast_column("image", datasets.Image(mode="RGB"))
