"""Samples in tar files, as WebDataset names them, read in any order.

    data/train-000.tar      cat/0001.jpg  cat/0001.cls  dog/0001.jpg  dog/0001.cls ...
    data/test-000.tar

By default a sample has an image and a class, `members={"image": "jpg;png", "label": "cls"}`. Other
members are not read, unless `members` names them:

    .cls    a whole number
    .npy    an array of numbers; no pickles
    .json   a number or lists of numbers; "json:age" is the entry "age" of an object

Labels are read at the start.
"""

import io
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jddp.data.examples import Examples, NumpyBatch, in_32_bits
from jddp.data.image_transforms import CropAndFlip, normalize
from jddp.data.row_examples import RowExamples
from jddp.data.source import DataSource, make_data_set, spec_of
from jddp.data.sources.images import (
    ENDINGS,
    MEAN,
    STD,
    TEST_MARGIN,
    check_image_arguments,
    decode_image,
    decode_images,
)
from jddp.data.sources.mapped import files_of, refusing_damage
from jddp.data.sources.tar_samples import Samples, find_samples
from jddp.data.split import selected_parts
from jddp.data.transforms import Transformed
from jddp.errors import ConfigError, DataError

IMAGES = {ending.removeprefix(".") for ending in ENDINGS}
MEMBERS = {"image": ";".join(sorted(IMAGES)), "label": "cls"}
PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


class SampleMember(NamedTuple):
    """A member of each sample.

    Attributes:
      name: Name of its array in a batch.
      endings: Endings of its name, of which a sample has one.
      key: Entry to read of an object of JSON; empty for all of it.
    """

    name: str
    endings: tuple[str, ...]
    key: str = ""

    @classmethod
    def of(cls, name: str, text: str) -> "SampleMember":
        """The member that an entry of `members` describes.

        Raises:
          ConfigError: If it is nothing that is decoded.
        """
        endings, _, key = text.partition(":")
        member = cls(name, tuple(endings.lower().split(";")), key)
        kinds = {ending.rpartition(".")[2] for ending in member.endings}
        if not (kinds <= IMAGES if name == "image" else len(kinds) == 1 and kinds <= {*DECODERS}):
            known = sorted(IMAGES) if name == "image" else [*DECODERS]
            raise ConfigError(
                f"data.kwargs.members: {name}: {text!r} is not decoded. Choose "
                f"{' or '.join(known)}; only 'image' is decoded as an image."
            )
        return member

    def decode(self, content: bytes, where: str) -> Any:
        """The number or array in a content.

        Raises:
          DataError: If it is damaged, or holds anything else.
        """
        kind = self.endings[0].rpartition(".")[2]
        with refusing_damage(f"{where}.{self.endings[0]}", f".{kind} file"):
            value = DECODERS[kind](content)
            return value[self.key] if self.key else value


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "cls": int,
    "json": json.loads,
    "npy": lambda content: np.load(io.BytesIO(content), allow_pickle=False),
}


@dataclass(frozen=True, eq=False)
class _Images:
    """The images of samples, which are the members of this number."""

    samples: Samples
    number: int
    size: int
    margin: float
    masked: set[int] | None

    def take(self, indices: np.ndarray) -> NumpyBatch:
        return decode_images(self._decode, indices, self.size, masked=self.masked)

    def _decode(self, index: int) -> np.ndarray:
        where = self.samples.called(index)
        content = self.samples.read(index, self.number)
        return decode_image(content, self.size, margin=self.margin, where=where)


@dataclass(frozen=True, eq=False)
class _Arrays:
    """The rows of members that are no images, by the numbers of the members."""

    samples: Samples
    members: Mapping[int, SampleMember]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {x.name: _decoded(self.samples, index, n, x) for n, x in self.members.items()}


@dataclass(eq=False)
class WebDatasetExamples:
    """Samples of tar files, decoded when they are read.

    Attributes:
      samples: The samples.
      members: Their members.
      image_size: Height and width of the images that are returned, in pixels; not used without a
        member "image".
      margin: Fraction of the shorter side that is cropped, half of it on each side.
      keep_undecodable: Whether an image that does not decode becomes a black one of mask 0; it is
        an error otherwise.
      labels: The labels, int32; None without a member "label".

    Raises:
      DataError: If a label is no whole number from 0 on.
    """

    samples: Samples
    members: Sequence[SampleMember]
    image_size: int
    margin: float = 0.0
    keep_undecodable: bool = False

    def __post_init__(self) -> None:
        number_of = {member.name: number for number, member in enumerate(self.members)}
        image, label = (number_of.pop(name, None) for name in ("image", "label"))
        others = {number: self.members[number] for number in number_of.values()}
        self.labels = None if label is None else _labels(self.samples, label, self.members[label])
        self._parts: list[_Images | RowExamples] = []
        if image is not None:
            masked: set[int] | None = set() if self.keep_undecodable else None
            images = _Images(self.samples, image, self.image_size, self.margin, masked)
            self._parts.append(images)
        if others:
            self._parts.append(RowExamples(_Arrays(self.samples, others)))

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def files(self) -> list[str]:
        """The tar file and the name of each sample."""
        return [self.samples.called(index) for index in range(len(self))]

    def take(self, indices: np.ndarray) -> NumpyBatch:
        """The members by name: uint8 "image", int32 "label", and numbers in 32 bits.

        Raises:
          DataError: If a member cannot be read, or does not decode and may not be missing.
        """
        batch = {} if self.labels is None else {"label": self.labels[indices]}
        for part in self._parts:
            batch |= part.take(indices)
        return batch

    def fingerprint(self) -> str:
        """A hash of the labels, and of the names and sizes of all members."""
        labels = b"" if self.labels is None else self.labels.tobytes()
        return sha256(self.samples.fingerprint().encode() + labels).hexdigest()


def _decoded(samples: Samples, index: int, number: int, member: SampleMember) -> Any:
    return member.decode(samples.read(index, number), samples.called(index))


def _labels(samples: Samples, number: int, member: SampleMember) -> np.ndarray:
    """The labels of all samples.

    Raises:
      DataError: If one is no whole number from 0 on, or needs 64 bits.
    """
    labels = []
    for index in range(len(samples)):
        value = _decoded(samples, index, number, member)
        try:
            label = operator.index(value)
        except TypeError:
            label = -1
        if label < 0:
            raise DataError(
                f"{samples.called(index)}: the label is {value!r}. It needs a whole number from 0; "
                "other numbers need another name: data.kwargs.members."
            )
        labels.append(label)
    return in_32_bits("label", np.array(labels), range(len(samples)))


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
      members: Endings of the members of a sample, by the names of their arrays.
      num_classes: Number of classes; by default the largest label of the training part, plus 1.
      mean: Value to subtract from pixels over 255; one number, or one per channel.
      std: Divisor after that.
      undecodable: "error", or "mask": such an image is masked out, and named in the log.
      test_share: Fraction of the samples that are for testing; None if they are in files of their
        own.

    Raises:
      ConfigError: If an argument breaks its rule, or Pillow is not installed.
      DataError: If a file is missing, cut off or damaged, or a sample is not whole.
    """
    if not isinstance(members, Mapping) or not members:
        raise ConfigError(
            f"data.kwargs.members: {members!r}. Give endings by names: {{image: jpg, label: cls}}."
        )
    found = [SampleMember.of(name, str(text)) for name, text in members.items()]
    is_of_images = "image" in members
    if is_of_images != (image_size is not None):
        raise ConfigError(
            f"data.kwargs.image_size={image_size}, and the members are {', '.join(members)}. A "
            "size is needed with 'image', and has no meaning without."
        )
    if is_of_images:
        check_image_arguments(mean, std, undecodable, needed_by="webdataset")

    def examples(samples: Samples, margin: float) -> WebDatasetExamples:
        return WebDatasetExamples(
            samples, found, image_size or 0, margin, keep_undecodable=undecodable == "mask"
        )

    def scaled(part: WebDatasetExamples) -> Examples:
        return Transformed(part, normalize(mean, std)) if is_of_images else part

    endings = [member.endings for member in found]
    training, testing = selected_parts(
        lambda part: find_samples(_shards(directory, part), endings), test_share
    )
    train, test = examples(training, 0.0), examples(testing, TEST_MARGIN)
    digest = sha256((train.fingerprint() + test.fingerprint()).encode())
    sizes = _sizes(directory, train.labels, test.labels, num_classes)
    data = make_data_set(
        f"webdataset {directory}", scaled(train), scaled(test), sha256_hex=digest.hexdigest()
    )
    augment = (CropAndFlip(),) if is_of_images else ()
    return DataSource(spec_of(data.train), lambda: data, augment, sizes)


def _shards(directory: Path, part: str) -> list[Path]:
    """The tar files of a part, in the order of their names."""
    for ending in PACKED:
        if packed := sorted(directory.glob(f"{part}*{ending}")):
            raise DataError(
                f"{packed[0]}: a packed tar file can only be read from its start. Unpack it into "
                "a .tar file."
            )
    return files_of(directory, part, ".tar")


def _sizes(
    directory: Path,
    training: np.ndarray | None,
    testing: np.ndarray | None,
    num_classes: int | None,
) -> dict[str, int]:
    """The number of classes, if there are labels, all of them below it."""
    if training is None or testing is None:
        return {}
    num_found = int(training.max()) + 1 if num_classes is None else num_classes
    highest = max(int(labels.max()) for labels in (training, testing))
    if highest >= num_found:
        raise DataError(
            f"{directory}: label {highest} is not below the number of classes, {num_found}. Give "
            f"data.kwargs.num_classes={highest + 1}, or fix the labels."
        )
    return {"num_classes": num_found}
