"""Decodes an image of a file and scales it.

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

import numpy as np

from jddp.data.examples import NumpyBatch
from jddp.data.extras import import_extra
from jddp.data.image_arrays import check_per_channel
from jddp.errors import ConfigError, DataError

# By the first bytes of a file, whatever its name. Other formats of Pillow start programs.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
TEST_MARGIN = 0.125


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


def decode_image(file: bytes, size: int, *, margin: float = 0.0, where: str) -> np.ndarray:
    """The pixels of an image, uint8 `(size, size, 3)`.

    Args:
      file: Content of its file, in one of `FORMATS`.
      size: Height and width of the result.
      margin: Fraction of the shorter side that is cropped, half of it on each side.
      where: Name of the image, for errors.

    Raises:
      UndecodableError: If it does not decode, or has more pixels than Pillow allows.
    """
    from PIL import Image, ImageOps

    with refusing_undecodable(where), Image.open(io.BytesIO(file), formats=FORMATS) as image:
        if image.format == "JPEG" and image.mode == "RGB":
            whole = Image.fromarray(_decode_jpeg(file, least=size / (1 - margin)))
        else:
            whole = image.convert("RGB")
        kernel = Image.Resampling.BILINEAR
        return np.asarray(ImageOps.fit(whole, (size, size), kernel, bleed=margin / 2))


def _decode_jpeg(file: bytes, least: float) -> np.ndarray:
    """The pixels, at the smallest number of eighths of the size whose sides have `least` pixels."""
    simplejpeg = import_extra("simplejpeg", needed_by="JPEG")
    pixels = math.ceil(least)
    least_size = {"min_height": pixels, "min_width": pixels, "min_factor": 1}
    return np.asarray(simplejpeg.decode_jpeg(file, "RGB", fastdct=False, **least_size))


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
