"""Your arrays in a directory, memory-mapped if the format allows it.

- `idx`: grey images and labels as MNIST and its relatives are published, read into memory;
- `npy`: images and labels in train_images.npy, train_labels.npy, test_images.npy, test_labels.npy;
- `npz`: any arrays by name in train.npz and test.npz; compressed arrays are read at once.

Headers are checked when the files are opened, rows when they are read. The hash of such data covers
its sizes and the rows at both ends: reading all of it could take hours.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jddp.data.examples import Examples
from jddp.data.source import (
    DataSource,
    check_share,
    image_spec,
    make_data_set,
    parts_of,
    source_of,
)
from jddp.data.sources.files import map_npy, map_npz, read_idx
from jddp.data.sources.images import image_examples
from jddp.data.transforms import FlipAndShift
from jddp.ground.errors import DataError

Read = Callable[[str], list[np.ndarray]]  # from "train" or "test" to images and labels


def npy(
    *,
    directory: Path,
    image_size: int,
    num_classes: int,
    num_channels: int = 3,
    mean: float | Sequence[float] = 0.5,
    std: float | Sequence[float] = 0.5,
    max_shift: int = 2,
    test_share: float | None = None,
) -> DataSource:
    """The source of labelled square images in a directory.

    Args:
      directory: Folder of the four files: images `(n, size, size, channels)` in uint8, or in
        floating point and already normalized, and whole-number labels `(n,)`.
      image_size: Height and width, in pixels.
      num_classes: Number of classes; labels are below it.
      num_channels: 1 for grey, 3 for colour.
      mean: Value to subtract from uint8 images over 255; one number, or one per channel.
      std: Divisor after that.
      max_shift: Largest move of a training image by augmentation, in pixels.
      test_share: Fraction of the training images that are for testing in place of the two files for
        test.
    """

    def read(part: str) -> list[np.ndarray]:
        return [map_npy(directory / f"{part}_{name}.npy") for name in ("images", "labels")]

    shape = (image_size, image_size, num_channels)
    return _images(
        f"npy {directory}", read, shape, num_classes, max_shift, test_share, mean=mean, std=std
    )


def idx(
    *,
    directory: Path,
    image_size: int,
    num_classes: int,
    mean: float = 0.5,
    std: float = 0.5,
    max_shift: int = 2,
    test_share: float | None = None,
) -> DataSource:
    """The source of labelled square grey images in four IDX files, which are read into memory.

    Args:
      directory: Folder of train-images-idx3-ubyte, train-labels-idx1-ubyte, and the same two of
        t10k; with or without .gz.
      image_size: Height and width, in pixels.
      num_classes: Number of classes; labels are below it.
      mean: Value to subtract from pixels over 255.
      std: Divisor after that.
      max_shift: Largest move of a training image by augmentation, in pixels.
      test_share: Fraction of the training images that are for testing in place of the files t10k.
    """

    def read(part: str) -> list[np.ndarray]:
        stem = {"test": "t10k"}.get(part, part)
        names = (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte")
        packed = (directory / f"{name}.gz" for name in names)
        images, labels = (read_idx(gz if gz.exists() else gz.with_suffix("")) for gz in packed)
        return [images[..., None], labels]

    shape = (image_size, image_size, 1)
    return _images(
        f"idx {directory}", read, shape, num_classes, max_shift, test_share, mean=mean, std=std
    )


def _images(
    name: str,
    read: Read,
    shape: tuple[int, ...],
    num_classes: int,
    max_shift: int,
    test_share: float | None,
    **scale: float | Sequence[float],
) -> DataSource:
    """The source of images and labels that `read` returns for "train" and for "test"."""

    def examples(part: str) -> Examples:
        images, labels = read(part)
        if images.shape[1:] != shape:
            raise DataError(
                f"{name}: {part} has images of shape {images.shape[1:]}, but image_size and "
                f"num_channels ask for {shape}. Change one of the two."
            )
        lowest, highest = labels.min(initial=0), labels.max(initial=0)
        if lowest < 0 or highest >= num_classes:
            raise DataError(
                f"{name}: {part}: labels range from {lowest} to {highest}. With num_classes "
                f"{num_classes} they must be in 0 ... {num_classes - 1}."
            )
        return image_examples(images, labels, **scale)

    if test_share is not None:
        check_share(test_share)
    return DataSource(
        image_spec(*shape),
        lambda: make_data_set(name, *parts_of(examples, test_share)),
        (FlipAndShift(max_shift),),
        {"num_classes": num_classes},
    )


def npz(*, directory: Path, test_share: float | None = None) -> DataSource:
    """The source of all arrays in train.npz and test.npz in a directory.

    Args:
      directory: Folder of the two files; their arrays have one row per example.
      test_share: Fraction of the rows of train.npz that are for testing in place of test.npz.

    Raises:
      DataError: If the files are missing or damaged, or do not hold examples.
    """
    parts = parts_of(lambda part: map_npz(directory / f"{part}.npz"), test_share)
    return source_of(f"npz {directory}", *parts)


def load_weights(path: Path) -> np.ndarray:
    """The numbers in a .npy file.

    Raises:
      DataError: If there is no such file, or it holds no numbers.
    """
    weights = map_npy(path)
    if weights.dtype.kind not in "iuf":
        raise DataError(f"{path}: weights are {weights.dtype}. They must be numbers.")
    return np.asarray(weights, np.float64)
