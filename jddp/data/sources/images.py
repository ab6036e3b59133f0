"""Images in folders, one folder a class, decoded when they are read.

    data/train/cat/0001.jpg      data/test/cat/0001.jpg
    data/train/dog/0001.jpg      data/test/dog/0001.jpg

Without the folders train and test, `test_share=0.2` uses this share of the images for testing. The
hash of its name puts an image on one side, so it stays there when others are added.

An image is the same array whatever holds its file. Pillow reads the header. JPEG in colour is
decoded by simplejpeg, which takes 0.8 of Pillow's time for photographs (benchmarks/jpeg.py), all
else by Pillow. An image is scaled until its shorter side fits, and its middle is kept. Pillow's
limit on the number of pixels applies: a larger image is refused like one that does not decode.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jddp.data import source
from jddp.data.examples import NumpyBatch, RowExamples
from jddp.data.sources.arrays import check_per_channel, import_extra, refusing_damage
from jddp.data.transforms import CropAndFlip, Transformed, normalize
from jddp.ground.errors import DataError, printable

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage


# Recognized by the first bytes of a file, whatever its name. Some other formats start programs.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # Statistics of ImageNet.
TEST_MARGIN = 0.125
MOST_OF_JPEG = 65_535  # Longest side, in pixels.


def decode_image(
    file: bytes,
    size: int | None = None,
    *,
    margin: float = 0.0,
    mode: str | None = "RGB",
    where: str,
) -> np.ndarray:
    """The pixels of an image as it is shown: upright by its EXIF orientation, in 8 bits, on white.

    Args:
      file: Content of its file, in one of `FORMATS`.
      size: Height and width of the result; None to keep the size of the image.
      margin: Fraction of the shorter side that is cropped, half of it on each side.
      mode: Mode of Pillow. "RGB" makes uint8 `(height, width, 3)`; "L" uint8 `(height, width)`,
        grey; None the latter if the image is grey, and the former if it is not. Pixels in other
        modes are not scaled, and keep their alpha.
      where: Name of the image, for errors.

    Raises:
      DataError: If it does not decode, has more pixels than Pillow allows, or 32 bits a pixel.
    """
    from PIL import Image, ImageOps

    with refusing_damage(where, "image"), Image.open(io.BytesIO(file), formats=FORMATS) as image:
        if image.format == "JPEG" and image.mode == "RGB":
            # JPEG decodes at n / 8 of its size: the smallest n with enough pixels a side.
            least = MOST_OF_JPEG if size is None else math.ceil(size / (1 - margin))
            least_size = {"min_height": least, "min_width": least, "min_factor": 1}
            simplejpeg = import_extra("simplejpeg", needed_by="JPEG")
            pixels = simplejpeg.decode_jpeg(file, "RGB", fastdct=False, **least_size)
            whole: PillowImage = Image.fromarray(pixels)
        else:
            image.load()  # Loading turns a TIFF upright.
            whole = image
        if mode in (None, "L", "RGB"):
            whole = _as_shown(whole, where)
        if mode not in (None, whole.mode):
            whole = whole.convert(mode)
        if size is not None:
            kernel = Image.Resampling.BILINEAR
            whole = ImageOps.fit(whole, (size, size), kernel, bleed=margin / 2)
        return _upright(np.asarray(whole), image)


def _as_shown(image: "PillowImage", where: str) -> "PillowImage":
    """The image in mode L if it is grey, else RGB; white shows through transparent pixels."""
    from PIL import Image

    if image.mode[0] in "FI":
        pixels = np.asarray(image)
        if pixels.dtype.kind != "u":
            raise DataError(
                f"{where}: the pixels are {pixels.dtype}, and none is known as white. Save it in 8 "
                "or 16 bits."
            )
        pixels = np.where(pixels == image.info.get("transparency"), 65_535, pixels)
        return Image.fromarray(np.rint(pixels / 257).astype(np.uint8))
    mode = "L" if image.mode in ("1", "L", "LA") else "RGB"
    if image.has_transparency_data:
        visible = image.convert("RGBA")
        image = Image.new("RGB", image.size, "white")
        image.paste(visible, mask=visible)
    return image if image.mode == mode else image.convert(mode)


def _upright(pixels: np.ndarray, image: "PillowImage") -> np.ndarray:
    """Pixels turned by the EXIF orientation of an image: 1 to 4 mirror them, 5 to 8 transpose."""
    try:
        number = image.getexif().get(0x0112)
    except Exception:  # Damaged bytes can raise anything.
        number = None
    turned = pixels.swapaxes(0, 1) if number in (5, 6, 7, 8) else pixels
    down, right = number in (3, 4, 7, 8), number in (2, 3, 6, 7)
    return turned[:: -1 if down else 1, :: -1 if right else 1]


@dataclass(frozen=True, eq=False)
class FolderExamples(RowExamples):
    """Images of a folder, and the number of the class of each.

    Attributes:
      root: Folder of the images.
      classes: Names of the classes, in the order of their numbers.
      files: Paths of the images, relative to `root`.
      labels: Number of the class of each image, int32 `(n,)`.
      image_size: Height and width of the images that are returned, in pixels.
      margin: Fraction of the shorter side that is cropped, half of it on each side.
    """

    root: Path
    classes: list[str]
    files: list[str]
    labels: np.ndarray
    image_size: int
    margin: float = 0.0

    def __len__(self) -> int:
        return len(self.files)

    def column(self, name: str) -> np.ndarray | None:
        """The labels, which are at hand."""
        return self.labels if name == "label" else None

    def _rows_at(self, indices: list[int]) -> list[NumpyBatch]:
        rows = []
        for index in indices:
            path = self.root / self.files[index]
            where = printable(str(path))
            with refusing_damage(where, "image"):
                file = path.read_bytes()
            image = decode_image(file, self.image_size, margin=self.margin, where=where)
            rows.append({"image": image, "label": self.labels[index]})
        return rows

    def subset(self, indices: np.ndarray) -> "FolderExamples":
        """Some of these images."""
        files = [self.files[index] for index in indices]
        return replace(self, files=files, labels=self.labels[indices])

    def draws(self) -> np.ndarray:
        """A number from 0 to 1 for each image, by the hash of its name."""
        names = (name.encode(errors="surrogateescape") for name in self.files)
        return np.array([int.from_bytes(sha256(x).digest()[:8]) / 2**64 for x in names])

    def fingerprint(self) -> str:
        """A hash of names and sizes of all files."""
        sizes = (f"{name} {(self.root / name).stat().st_size}\n" for name in self.files)
        return sha256("".join(sizes).encode(errors="surrogateescape")).hexdigest()


def _classified(root: Path, image_size: int) -> FolderExamples:
    """The images in the folders of classes in a folder."""
    classes = _class_folders(root) if root.is_dir() else []
    if not classes:
        raise DataError(
            f"{root}: no folders of classes. Images are read from train/CLASS/*.jpg and "
            "test/CLASS/*.jpg in data.dir; or from CLASS/*.jpg, a share of which is for testing: "
            "data.kwargs.test_share=0.2."
        )
    images = [_images_in(root / name) for name in classes]
    for name, paths in zip(classes, images, strict=True):
        if not paths:
            raise DataError(f"{root / name}: no images of this class. Add some, or remove it.")
    labels = np.repeat(np.arange(len(images), dtype=np.int32), [*map(len, images)])
    files = [path.relative_to(root).as_posix() for paths in images for path in paths]
    return FolderExamples(root, classes, files, labels, image_size)


def _images_in(folder: Path) -> list[Path]:
    """The image files in a folder and below, by their endings, in the order of their names."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
    return sorted(path for path in found if not path.is_dir())


def _class_folders(root: Path) -> list[str]:
    """The names of the folders, without hidden ones, which editors and notebooks make."""
    return sorted(x.name for x in root.iterdir() if x.is_dir() and not x.name.startswith("."))


def image_folder(
    *,
    directory: Path,
    image_size: int,
    num_classes: int | None = None,
    mean: float | Sequence[float] = MEAN,
    std: float | Sequence[float] = STD,
    test_share: float | None = None,
) -> source.DataSource:
    """The source of a directory with the folders train and test, or with a folder for each class.

    Args:
      directory: Folder of "train" and "test", which have a folder for each class; or, with
        `test_share`, itself the folder of the classes.
      image_size: Height and width, in pixels.
      num_classes: Number of classes; by default the number of folders.
      mean: Value to subtract from pixels over 255; one number, or one per channel.
      std: Divisor after that.
      test_share: Fraction of the images that are for testing, chosen by a hash of their names;
        None if they are in the folder test.

    Raises:
      ConfigError: If an argument breaks its rule, or Pillow is not installed.
    """
    import_extra("PIL", needed_by="image_folder")
    check_per_channel(mean, std, 3)

    def load() -> source.DataSet:
        if test_share is not None and {"train", "test"} <= {*_class_folders(directory)}:
            raise DataError(f"{directory} has folders train and test. Leave test_share out.")
        train, test = source.selected_parts(
            lambda part: _classified(directory / part, image_size),
            test_share,
            FolderExamples.subset,
            FolderExamples.draws,
        )
        if odd := sorted({*train.classes} ^ {*test.classes}):
            part, other = ("train", "test") if odd[0] in train.classes else ("test", "train")
            raise DataError(
                f"{directory}: class {odd[0]!r} is in {part}, but not in {other}. Both need the "
                "same class folders."
            )
        test, scaling = replace(test, margin=TEST_MARGIN), normalize(mean, std)
        return source.make_data_set(
            f"image_folder {directory}",
            Transformed(train, scaling),
            Transformed(test, scaling),
            sha256_hex=sha256((train.fingerprint() + test.fingerprint()).encode()).hexdigest(),
            classes=train.classes,
        )

    root = directory if test_share is not None else directory / "train"
    num_folders = num_classes or (len(_class_folders(root)) if root.is_dir() else 0)
    sizes = {"num_classes": num_folders} if num_folders else {}
    return source.DataSource(
        source.image_spec(image_size, image_size, 3), load, (CropAndFlip(),), sizes
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
      **others: Arguments of `image_folder` that concern labels.
    """
    files = [path.relative_to(directory).as_posix() for path in _images_in(directory)]
    labels = np.zeros(len(files), np.int32)
    images = FolderExamples(directory, [], files, labels, image_size, TEST_MARGIN)
    return Transformed(images, normalize(mean, std))
