"""Samples in tar files, as WebDataset names them, read by Hugging Face's `datasets`.

    data/train-000.tar      cat/0001.jpg  cat/0001.cls  dog/0001.jpg  dog/0001.cls ...
    data/test-000.tar

The library copies tar files into its cache once, from where samples are read in any order. By
default a sample has an image and a class, `members={"image": "jpg;png", "label": "cls"}`. Other
members are not read, unless `members` names them: `{"x": "left.npy", "age": "json:age"}` for an
array of numbers, and for an entry of a JSON object. Labels are read at the start.
"""

import glob
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from jddp.data.examples import Examples, NumpyBatch, in_32_bits
from jddp.data.source import DataSource, make_data_set, selected_parts, spec_of
from jddp.data.sources.files import files_of
from jddp.data.sources.hugging_face import Row, StoredRows, reading, undecoded
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
from jddp.ground.errors import ConfigError, DataError, printable

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
