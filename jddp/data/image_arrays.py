"""Images in one array, with a label each: kept as they are stored, and normalized when read."""

from collections.abc import Sequence

import numpy as np

from jddp.data.examples import ArrayExamples, Examples
from jddp.data.image_transforms import normalize
from jddp.data.transforms import Transformed
from jddp.errors import DataError


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
