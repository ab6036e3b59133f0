"""Images in one array, with a label each: kept as they are stored, and normalized when read."""

from collections.abc import Sequence

import numpy as np

from jddp.data.examples import Examples, NumpyBatch, check_numbers
from jddp.data.image_transforms import normalize
from jddp.data.transforms import Transformed
from jddp.errors import DataError


class StoredImages:
    """Images as they are stored, with a label each."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        """Checks shapes; reads no image, so that a memory-mapped array stays on disk.

        Args:
          images: Array `(n, height, width, channels)`, of uint8 or floating point.
          labels: Whole numbers from 0, `(n,)`.

        Raises:
          DataError: If there are no images, or shapes or dtypes differ from the above.
        """
        if images.ndim != 4 or len(images) == 0:
            raise DataError(
                f"images have shape {images.shape}. They need (n, height, width, channels), n > 0."
            )
        if images.dtype != np.uint8 and images.dtype.kind != "f":
            raise DataError(f"images are {images.dtype}. They need uint8 or floating point.")
        if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
            raise DataError(
                f"labels are {labels.dtype}{labels.shape} for {len(images)} images. Each image "
                "needs one whole number."
            )
        self._images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self._images)

    def take(self, indices: np.ndarray) -> NumpyBatch:
        """Images of uint8 or float32, `(b, height, width, channels)`, and int32 labels `(b,)`.

        Raises:
          DataError: If a floating-point image holds a number that is not finite.
        """
        images = self._images[indices]
        if images.dtype != np.uint8:
            images = images.astype(np.float32)
            check_numbers("image", images, indices)
        return {"image": images, "label": self.labels[indices].astype(np.int32)}


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
      DataError: If shapes or dtypes differ from the above, or numbers are not one per channel.
    """
    stored = StoredImages(images, labels)
    check_per_channel("mean", mean, images.shape[-1])
    check_per_channel("std", std, images.shape[-1])
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
