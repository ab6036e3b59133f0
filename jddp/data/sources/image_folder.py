"""Images in folders, one folder a class, decoded by Pillow when they are read.

    data/train/cat/0001.jpg      data/test/cat/0001.jpg
    data/train/dog/0001.jpg      data/test/dog/0001.jpg

An image is scaled until its shorter side fits, and its middle is kept. Pillow's limit on the number
of pixels stays as it is: a larger image is refused like one that does not decode.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from jddp.data.augment import CropAndFlip
from jddp.data.examples import Batch, per_channel
from jddp.data.extras import import_extra
from jddp.data.source import DataSet, Source, image_spec, make_data_set
from jddp.errors import ConfigError, DataError

ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
TEST_MARGIN = 0.125


@dataclass(eq=False)
class FolderExamples:
    """Images of a folder, and the number of the class of each.

    Attributes:
      root: Folder with one folder for each class.
      image_size: Height and width of the images that are returned, in pixels.
      margin: Fraction of the shorter side that is cropped, half of it on each side.
      mean: Value to subtract, in the range 0 to 1; one number, or one per channel.
      std: Divisor after that.
      keep_undecodable: Whether an image that does not decode becomes a black one of mask 0; it is
        an error otherwise.
      is_labelled: Whether there is a folder for each class; otherwise all images in the folder and
        below are taken, with label 0.
      files: Paths of the images, relative to `root`, in their order.
      classes: Names of the classes, in the order of their numbers.

    Raises:
      DataError: If there are no images.
    """

    root: Path
    image_size: int
    margin: float = 0.0
    mean: float | Sequence[float] = 0.5
    std: float | Sequence[float] = 0.5
    keep_undecodable: bool = False
    is_labelled: bool = True

    def __post_init__(self) -> None:
        root = self.root
        if not root.is_dir():
            raise DataError(f"{root}: no such folder. It is needed; see data.dir.")
        folders = [path.name for path in root.iterdir() if path.is_dir()]
        self.classes = sorted(folders) if self.is_labelled else [""]
        found = [
            (path.relative_to(root).as_posix(), label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).rglob("*"))
            if path.suffix.lower() in ENDINGS
        ]
        if not found:
            where = "in folders of classes" if self.is_labelled else "here or below"
            raise DataError(f"{root}: no images {where}. Put some there.")
        self._mean, self._std = per_channel("mean", self.mean, 3), per_channel("std", self.std, 3)
        self.files = [name for name, _ in found]
        self.labels = np.array([label for _, label in found], np.int32)

    def __len__(self) -> int:
        return len(self.files)

    def take(self, indices: np.ndarray) -> Batch:
        """float32 "image" `(b, size, size, 3)`, int32 "label", and "mask" if some may be missing.

        Raises:
          DataError: If an image does not decode, and none may be missing.
        """
        images = np.zeros((len(indices), self.image_size, self.image_size, 3), np.uint8)
        counts = np.ones(len(indices), np.float32)
        for row, index in enumerate(indices.tolist()):
            try:
                images[row] = self.decode(index)
            except DataError as error:
                if not self.keep_undecodable:
                    raise
                logging.getLogger("jddp").warning("%s It is not counted.", error)
                counts[row] = 0
        scaled = images * (1 / (255 * self._std)) - self._mean / self._std
        batch = {"image": scaled.astype(np.float32), "label": self.labels[indices]}
        return batch | ({"mask": counts} if self.keep_undecodable else {})

    def decode(self, index: int) -> np.ndarray:
        """One image, uint8 `(size, size, 3)`.

        Raises:
          DataError: If it does not decode, or has more pixels than Pillow allows.
        """
        from PIL import Image, ImageOps

        path, size = self.root / self.files[index], self.image_size
        bomb = (Image.DecompressionBombError, Image.DecompressionBombWarning)
        try:
            with Image.open(path) as file:
                wanted = size / ((1 - self.margin) * min(file.size))
                if wanted <= 0.5:  # JPEG is decoded at a fraction of its size
                    file.draft("RGB", (round(file.width * wanted), round(file.height * wanted)))
                image, kernel = file.convert("RGB"), Image.Resampling.BILINEAR
                return np.asarray(ImageOps.fit(image, (size, size), kernel, bleed=self.margin / 2))
        except (OSError, SyntaxError, ValueError, *bomb) as error:
            raise DataError(f"{path}: does not decode ({error}).") from error

    def fingerprint(self) -> str:
        """A hash of names and sizes of all files."""
        sizes = (f"{name} {(self.root / name).stat().st_size}\n" for name in self.files)
        return sha256("".join(sizes).encode()).hexdigest()


def image_folder(
    *,
    directory: Path,
    image_size: int,
    num_classes: int | None = None,
    mean: float | Sequence[float] = MEAN,
    std: float | Sequence[float] = STD,
    undecodable: str = "error",
) -> Source:
    """The source of a directory with the folders train and test.

    Args:
      directory: Folder of "train" and "test", which have a folder for each class.
      image_size: Height and width, in pixels.
      num_classes: Number of classes, any other is refused; None takes any.
      mean: Value to subtract from pixels over 255; one number, or one per channel.
      std: Divisor after that.
      undecodable: "error", or "mask": such an image is masked out, and named in the log.

    Raises:
      ConfigError: If an argument breaks its rule, or Pillow is not installed.
    """
    if undecodable not in ("error", "mask"):
        raise ConfigError(f"data.kwargs.undecodable: {undecodable!r}. Choose 'error' or 'mask'.")
    import_extra("PIL", needed_by="image_folder")
    masks = undecodable == "mask"

    def load() -> DataSet:
        train, test = (
            FolderExamples(directory / part, image_size, margin, mean, std, keep_undecodable=masks)
            for part, margin in (("train", 0.0), ("test", TEST_MARGIN))
        )
        if train.classes != test.classes or num_classes not in (None, len(train.classes)):
            raise DataError(
                f"{directory}: train has {len(train.classes)} classes, test {len(test.classes)}, "
                f"and num_classes is {num_classes}. The folders must be the same."
            )
        digest = sha256((train.fingerprint() + test.fingerprint()).encode()).hexdigest()
        return make_data_set(f"image_folder {directory}", train, test, sha256_hex=digest)

    spec = image_spec(image_size, image_size, 3)
    if masks:
        spec["mask"] = ((), np.dtype("float32"))
    found = num_classes or sum(path.is_dir() for path in (directory / "train").glob("*"))
    return Source(spec, load, CropAndFlip(), {"num_classes": found} if found else {})


def images_in(
    directory: Path,
    *,
    image_size: int,
    mean: float | Sequence[float] = MEAN,
    std: float | Sequence[float] = STD,
    **others: Any,
) -> FolderExamples:
    """All images in a folder and below, as those for testing of a source with these arguments.

    Args:
      directory: The folder; its images need no labels.
      image_size: Height and width, in pixels.
      mean: Value to subtract from pixels over 255; one number, or one per channel.
      std: Divisor after that.
      **others: Arguments of `image_folder` that concern labels, or images that do not decode.
    """
    return FolderExamples(directory, image_size, TEST_MARGIN, mean, std, is_labelled=False)
