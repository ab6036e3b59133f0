"""Images in folders, one folder a class, decoded when they are read.

    data/train/cat/0001.jpg      data/test/cat/0001.jpg
    data/train/dog/0001.jpg      data/test/dog/0001.jpg

Without the folders train and test, `test_share=0.2` uses this share of the images for testing. The
hash of its name puts an image on one side, so it stays there when others are added.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jddp.data.examples import NumpyBatch
from jddp.data.image_transforms import CropAndFlip, normalize
from jddp.data.source import DataSet, DataSource, image_spec, make_data_set
from jddp.data.sources.images import (
    ENDINGS,
    MEAN,
    STD,
    TEST_MARGIN,
    check_image_arguments,
    decode_image,
    decode_images,
)
from jddp.data.sources.mapped import refusing_damage
from jddp.data.split import check_share
from jddp.data.transforms import Transformed
from jddp.errors import DataError

LAYOUT = (
    "Images are read from train/CLASS/*.jpg and test/CLASS/*.jpg in data.dir; or from CLASS/*.jpg, "
    "a share of which is for testing: data.kwargs.test_share=0.2."
)


class HashSplit(NamedTuple):
    """One side of a split of images into those for training and those for testing.

    Attributes:
      test_share: Fraction of the images that are for testing.
      is_test: Whether this side is for testing.
    """

    test_share: float
    is_test: bool

    def takes(self, name: str) -> bool:
        """Whether an image with this name is on this side: a hash of the name decides."""
        draw = int.from_bytes(sha256(name.encode(errors="surrogateescape")).digest()[:8]) / 2**64
        return (draw < self.test_share) == self.is_test


@dataclass(eq=False)
class FolderExamples:
    """Images of a folder, and the number of the class of each.

    Attributes:
      root: Folder with one folder for each class.
      image_size: Height and width of the images that are returned, in pixels.
      margin: Fraction of the shorter side that is cropped, half of it on each side.
      keep_undecodable: Whether an image that does not decode becomes a black one of mask 0; it is
        an error otherwise.
      is_labelled: Whether there is a folder for each class; otherwise all images in the folder and
        below it are used, with label 0.
      split: Share of the images to use, chosen by their names; None for all.
      files: Paths of the images, relative to `root`, in their order.
      classes: Names of the classes, in the order of their numbers.

    Raises:
      DataError: If there are no images.
    """

    root: Path
    image_size: int
    margin: float = 0.0
    keep_undecodable: bool = False
    is_labelled: bool = True
    split: HashSplit | None = None

    def __post_init__(self) -> None:
        root = self.root
        if not root.is_dir():
            raise DataError(f"{root}: no such folder. {LAYOUT}")
        self.classes = _class_folders(root) if self.is_labelled else [""]
        found = [
            (path.relative_to(root).as_posix(), label)
            for label, name in enumerate(self.classes)
            for path in _images_in(root / name)
        ]
        if not found:
            where = "in folders of classes" if self.is_labelled else "here or below"
            raise DataError(f"{root}: no images {where}. Add some.")
        if empty := sorted({*range(len(self.classes))} - {label for _, label in found}):
            name = self.classes[empty[0]]
            raise DataError(
                f"{_shown(root / name)}: no images of this class. Add some, or remove the folder."
            )
        if self.split is not None:
            found = [(name, label) for name, label in found if self.split.takes(name)]
        self.files = [name for name, _ in found]
        self._masked: set[int] | None = set() if self.keep_undecodable else None
        self.labels = np.array([label for _, label in found], np.int32)

    def __len__(self) -> int:
        return len(self.files)

    def take(self, indices: np.ndarray) -> NumpyBatch:
        """uint8 "image" `(b, size, size, 3)`, int32 "label", and "mask" if some may be missing.

        Raises:
          DataError: If an image cannot be read, or does not decode and none may be missing.
        """
        images = decode_images(self.decode, indices, self.image_size, masked=self._masked)
        return images | {"label": self.labels[indices]}

    def decode(self, index: int) -> np.ndarray:
        """One image, uint8 `(size, size, 3)`.

        Raises:
          DataError: If it cannot be read or does not decode.
        """
        path = self.root / self.files[index]
        where = _shown(path)
        with refusing_damage(where, "image"):
            return decode_image(path.read_bytes(), self.image_size, margin=self.margin, where=where)

    def fingerprint(self) -> str:
        """A hash of names and sizes of all files."""
        sizes = (f"{name} {(self.root / name).stat().st_size}\n" for name in self.files)
        return sha256("".join(sizes).encode(errors="surrogateescape")).hexdigest()


def _images_in(folder: Path) -> list[Path]:
    """The image files in a folder and below, by their endings, in the order of their names.

    Raises:
      DataError: If one is not a file, but a pipe, for example, which would never end.
    """
    images = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS):
        if path.is_file():
            images.append(path)
        elif not path.is_dir():
            raise DataError(f"{_shown(path)}: {_kind_of(path)}, not an image. Remove it.")
    return images


def _kind_of(path: Path) -> str:
    if path.is_symlink():
        return "a link that leads to no file"
    return "a named pipe" if path.is_fifo() else "no file"


def _shown(path: Path) -> str:
    """The path as text that every log accepts: its bytes need not be UTF-8."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _class_folders(root: Path) -> list[str]:
    """The names of the folders, without hidden ones, which editors and notebooks make.

    Raises:
      DataError: If one is a link to a folder above it, whose images would count twice.
    """
    folders = [path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")]
    around = {root.resolve(), *root.resolve().parents}
    for path in folders:
        if path.is_symlink() and path.resolve() in around:
            raise DataError(f"{_shown(path)}: a link to a folder that contains it. Remove it.")
    return sorted(path.name for path in folders)


def image_folder(
    *,
    directory: Path,
    image_size: int,
    num_classes: int | None = None,
    mean: float | Sequence[float] = MEAN,
    std: float | Sequence[float] = STD,
    undecodable: str = "error",
    test_share: float | None = None,
) -> DataSource:
    """The source of a directory with the folders train and test, or with a folder for each class.

    Args:
      directory: Folder of "train" and "test", which have a folder for each class; or, with
        `test_share`, itself the folder of the classes.
      image_size: Height and width, in pixels.
      num_classes: Number of classes; any other number is refused. None accepts any.
      mean: Value to subtract from pixels over 255; one number, or one per channel.
      std: Divisor after that.
      undecodable: "error", or "mask": such an image is masked out, and named in the log.
      test_share: Fraction of the images that are for testing, chosen by a hash of their names;
        None if they are in the folder test.

    Raises:
      ConfigError: If an argument breaks its rule, or Pillow is not installed.
    """
    check_image_arguments(mean, std, undecodable, needed_by="image_folder")
    if test_share is not None:
        check_share(test_share)
    masks = undecodable == "mask"
    scaling = normalize(mean, std)

    def examples(part: str, margin: float) -> FolderExamples:
        split = None if test_share is None else HashSplit(test_share, is_test=part == "test")
        root = directory if test_share is not None else directory / part
        found = FolderExamples(root, image_size, margin, keep_undecodable=masks, split=split)
        if not found.files:
            raise DataError(
                f"{root}: test_share={test_share} leaves no image for {part}. Choose another share."
            )
        return found

    def load() -> DataSet:
        if test_share is not None and {"train", "test"} <= {*_class_folders(directory)}:
            raise DataError(f"{directory} has folders train and test. Leave test_share out.")
        train = examples("train", 0.0)
        test = examples("test", TEST_MARGIN)
        _refuse_other_classes(directory, train.classes, test.classes, num_classes)
        digest = sha256((train.fingerprint() + test.fingerprint()).encode()).hexdigest()
        return make_data_set(
            f"image_folder {directory}",
            Transformed(train, scaling),
            Transformed(test, scaling),
            sha256_hex=digest,
            classes=train.classes,
        )

    spec = image_spec(image_size, image_size, 3)
    if masks:
        spec["mask"] = ((), np.dtype("float32"))
    root = directory if test_share is not None else directory / "train"
    found = num_classes or (len(_class_folders(root)) if root.is_dir() else 0)
    return DataSource(spec, load, (CropAndFlip(),), {"num_classes": found} if found else {})


def _refuse_other_classes(
    directory: Path, train: Sequence[str], test: Sequence[str], num_classes: int | None
) -> None:
    """Refuses classes that only one side has, and a wrong number of classes."""
    for part, other, names in (("train", "test", train), ("test", "train", test)):
        if missing := sorted({*names} - {*(test if part == "train" else train)}):
            raise DataError(
                f"{directory}: class {missing[0]!r} is in {part}, but not in {other}. Both "
                "need the same class folders."
            )
    if num_classes not in (None, len(train)):
        raise DataError(
            f"{directory} has {len(train)} classes, but num_classes is {num_classes}. Leave it "
            "out, or give the number of folders."
        )


def images_in(
    directory: Path,
    *,
    image_size: int,
    mean: float | Sequence[float] = MEAN,
    std: float | Sequence[float] = STD,
    **others: object,
) -> Transformed:
    """All images in a folder and below, prepared like the test images of such a source.

    Args:
      directory: The folder; its images need no labels.
      image_size: Height and width, in pixels.
      mean: Value to subtract from pixels over 255; one number, or one per channel.
      std: Divisor after that.
      **others: Arguments of `image_folder` that concern labels, or images that do not decode.
    """
    found = FolderExamples(directory, image_size, TEST_MARGIN, is_labelled=False)
    return Transformed(found, normalize(mean, std))
