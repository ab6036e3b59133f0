"""Decodes an image of a file and scales it: one image is one array, whatever holds the file.

Pillow reads the header. JPEG in colour is decoded by simplejpeg, which takes 0.8 of Pillow's time
for photographs (benchmarks/jpeg.py), all else by Pillow. An image is scaled until its shorter side
fits, and its middle is kept. Pillow's limit on the number of pixels applies: a larger image is
refused like one that does not decode.
"""

import contextlib
import io
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jddp.data.examples import ArrayExamples, Examples, NumpyBatch
from jddp.data.sources.files import import_extra
from jddp.data.transforms import Transformed, normalize
from jddp.ground.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

# By the first bytes of a file, whatever its name. Other formats of Pillow start programs.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
TEST_MARGIN = 0.125
MOST_OF_JPEG = 65_535  # pixels of a side


class UndecodableError(DataError):
    """An image does not decode, or has more pixels than Pillow allows."""


def check_image_arguments(
    mean: float | Sequence[float],
    std: float | Sequence[float],
    undecodable: str,
    *,
    needed_by: str,
) -> None:
    """Refuses arguments of a source of images that break their rule.

    Args:
      mean: Value to subtract from pixels over 255.
      std: Divisor after that.
      undecodable: What becomes of an image that does not decode.
      needed_by: Name of the source.

    Raises:
      ConfigError: If one does, or Pillow is not installed.
      DataError: If there are not as many numbers as channels.
    """
    if undecodable not in ("error", "mask"):
        raise ConfigError(f"data.kwargs.undecodable: {undecodable!r}. Choose 'error' or 'mask'.")
    import_extra("PIL", needed_by=needed_by)
    check_per_channel("mean", mean, 3)
    check_per_channel("std", std, 3)


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
      UndecodableError: If it does not decode, has more pixels than Pillow allows, or no pixel
        value that is known to be white.
    """
    from PIL import Image, ImageOps

    with refusing_undecodable(where), Image.open(io.BytesIO(file), formats=FORMATS) as image:
        if image.format == "JPEG" and image.mode == "RGB":
            least = MOST_OF_JPEG if size is None else math.ceil(size / (1 - margin))
            whole: PillowImage = Image.fromarray(_decode_jpeg(file, least))
        else:
            image.load()  # which turns a TIFF
            whole = image
        if mode in (None, "L", "RGB"):
            whole = _as_shown(whole, where)
        if mode not in (None, whole.mode):
            whole = whole.convert(mode)
        if size is not None:
            kernel = Image.Resampling.BILINEAR
            whole = ImageOps.fit(whole, (size, size), kernel, bleed=margin / 2)
        return _upright(np.asarray(whole), image)


def _decode_jpeg(file: bytes, least: int) -> np.ndarray:
    """The pixels, at the smallest number of eighths of the size whose sides have `least` pixels."""
    simplejpeg = import_extra("simplejpeg", needed_by="JPEG")
    least_size = {"min_height": least, "min_width": least, "min_factor": 1}
    return np.asarray(simplejpeg.decode_jpeg(file, "RGB", fastdct=False, **least_size))


def _as_shown(image: "PillowImage", where: str) -> "PillowImage":
    """The image in mode L if it is grey, else RGB; white shows through transparent pixels."""
    from PIL import Image

    if image.mode[0] in "FI":
        return Image.fromarray(_bytes_of(np.asarray(image), image.info.get("transparency"), where))
    mode = "L" if image.mode in ("1", "L", "LA") else "RGB"
    if image.has_transparency_data:
        visible = image.convert("RGBA")
        image = Image.new("RGB", image.size, "white")
        image.paste(visible, mask=visible)
    return image if image.mode == mode else image.convert(mode)


def _bytes_of(pixels: np.ndarray, transparent: int | None, where: str) -> np.ndarray:
    """Grey pixels of 16 bits, or of floating point from 0 to 1, as uint8; others are refused."""
    low, high = pixels.min(), pixels.max()
    if pixels.dtype.kind == "u":
        pixels = np.where(pixels == transparent, 65_535, pixels) / 65_535
    elif pixels.dtype.kind == "i" or not 0 <= low <= high <= 1:  # no NaN is
        raise UndecodableError(
            f"{where}: the pixels are {pixels.dtype} from {low:g} to {high:g}, none of them known "
            "as white. Save it in 8 or 16 bits, or in floating point from 0, black, to 1, white."
        )
    return np.rint(pixels * 255).astype(np.uint8)


def _upright(pixels: np.ndarray, image: "PillowImage") -> np.ndarray:
    """Pixels turned by the EXIF orientation of an image: 1 to 4 mirror them, 5 to 8 transpose."""
    try:
        number = image.getexif().get(0x0112)
    except Exception:  # damaged bytes, which can raise anything
        number = None
    turned = pixels.swapaxes(0, 1) if number in (5, 6, 7, 8) else pixels
    down, right = number in (3, 4, 7, 8), number in (2, 3, 6, 7)
    return turned[:: -1 if down else 1, :: -1 if right else 1]


def decode_images(
    decode: Callable[[int], np.ndarray], indices: np.ndarray, size: int, *, masked: set[int] | None
) -> NumpyBatch:
    """uint8 "image" `(b, size, size, 3)`; and float32 "mask" `(b,)`, if some may be missing.

    Args:
      decode: Function from the number of an image to its pixels.
      indices: Numbers of the images.
      size: Height and width, in pixels.
      masked: Numbers of the images so far that do not decode, to which others are added here: such
        an image becomes a black one of mask 0, and is named in the log. None if all must decode.

    Raises:
      DataError: If an image does not decode, and none may be missing.
    """
    images = np.zeros((len(indices), size, size, 3), np.uint8)
    mask = np.ones(len(indices), np.float32)
    for row, index in enumerate(indices.tolist()):
        try:
            images[row] = decode(index)
        except UndecodableError as error:
            if masked is None:
                way_out = "data.kwargs.undecodable=mask leaves out all such images."
                raise DataError(f"{error} {way_out}") from error
            if index not in masked:  # once, not in each epoch
                masked.add(index)
                text = "%s Until then it is masked out (such images so far: %d)."
                logging.getLogger("jddp").warning(text, error, len(masked))
            mask[row] = 0
    return {"image": images} | ({} if masked is None else {"mask": mask})


@contextlib.contextmanager
def refusing_undecodable(where: str) -> Iterator[None]:
    """While open, what Pillow raises for a bad image becomes an `UndecodableError`."""
    from PIL import Image

    bomb = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        yield
    except (OSError, SyntaxError, ValueError, *bomb) as error:
        reason = str(error).partition(" <_io")[0]  # Pillow names the buffer, and not the file
        raise UndecodableError(f"{where}: does not decode ({reason}). Remove it.") from error


def image_examples(
    images: np.ndarray,
    labels: np.ndarray,
    *,
    mean: float | Sequence[float] = 0.0,
    std: float | Sequence[float] = 1.0,
) -> Examples:
    """Examples of images and labels: images of uint8 are normalized, all others are used as is.

    Args:
      images: Array `(n, height, width, channels)`, of uint8 or floating point.
      labels: Whole numbers from 0, `(n,)`.
      mean: Value to subtract from uint8 over 255; one number, or one per channel.
      std: Divisor after that.

    Raises:
      DataError: If shapes or dtypes differ from the above, a number is not finite, or mean and std
        are not one number, or one per channel.
    """
    if images.ndim != 4 or len(images) == 0:
        raise DataError(
            f"images have shape {images.shape}. They need (n, height, width, channels), n > 0."
        )
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise DataError(f"images are {images.dtype}. They need uint8 or floating point.")
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise DataError(
            f"labels are {labels.dtype}{labels.shape} for {len(images)} images. Each image needs "
            "one whole number."
        )
    check_per_channel("mean", mean, images.shape[-1])
    check_per_channel("std", std, images.shape[-1])
    if images.dtype == np.float16:
        images = images.astype(np.float32)
    stored = ArrayExamples({"image": images, "label": labels.astype(np.int32)})
    return stored if images.dtype.kind == "f" else Transformed(stored, normalize(mean, std))


def check_per_channel(name: str, given: float | Sequence[float], num_channels: int) -> None:
    """Refuses anything but one number, or one for each channel of the images.

    Raises:
      DataError: If their number differs.
    """
    if np.shape(given) not in ((), (num_channels,)):
        raise DataError(
            f"{name} has {np.size(given)} numbers, but images have {num_channels} channels. Give "
            "one number, or one per channel."
        )
