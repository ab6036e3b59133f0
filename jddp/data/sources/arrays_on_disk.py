"""A user's own arrays in a directory, memory-mapped where the format allows it.

- `idx`: grey images and labels as MNIST and its relatives are published, read into memory;
- `npy`: images and labels in train_images.npy, train_labels.npy, test_images.npy, test_labels.npy;
- `npz`: any arrays by name in train.npz and test.npz; those that are compressed are read at once.

Headers are checked when the files are opened, rows when they are read. The hash of such data is
of its sizes and of the rows at both ends: reading all of it could take hours.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jddp.data.augment import FlipAndShift
from jddp.data.examples import ArrayExamples, ImageExamples, check_labels
from jddp.data.source import Source, make_data_set, spec_of
from jddp.data.sources.idx import read_idx
from jddp.data.sources.mapped import map_npy, map_npz
from jddp.errors import ConfigError, DataError


def npy(
    *,
    source: str,
    directory: str | None,
    image_size: int,
    num_classes: int,
    num_channels: int = 3,
    mean: float | Sequence[float] = 0.5,
    std: float | Sequence[float] = 0.5,
    max_shift: int = 2,
) -> Source:
    """The source of labelled square images in a directory.

    Args:
      source: "embedded" is the only value, and says nothing here.
      directory: Holds the four files: images `(n, size, size, channels)` of uint8, or of floating
        point that is normalised already, and whole-number labels `(n,)`.
      image_size: Height and width, in pixels.
      num_classes: Labels lie below it.
      num_channels: 1 for grey, 3 for colour.
      mean: Subtracted from uint8 images over 255; one number, or one per channel.
      std: Divides what is left.
      max_shift: Largest move of a training image by augmentation, in pixels.

    Raises:
      ConfigError: If an argument breaks its rule.
    """
    root = checked_directory("npy", source, directory)
    shape = (image_size, image_size, num_channels)

    def examples(part: str) -> ImageExamples:
        images = map_npy(root / f"{part}_images.npy")
        labels = map_npy(root / f"{part}_labels.npy")
        if images.shape[1:] != shape:
            raise DataError(
                f"{root}: {part}_images.npy has images of shape {images.shape[1:]}, and image_size "
                f"and num_channels say {shape}. Mend one of the two."
            )
        check_labels(labels, num_classes, where=root / f"{part}_labels.npy")
        return ImageExamples(images, labels, mean=mean, std=std)

    return Source(
        name="npy",
        spec={"image": (shape, np.dtype("float32")), "label": ((), np.dtype("int32"))},
        load=lambda: make_data_set(f"npy {root}", examples("train"), examples("test")),
        augment=FlipAndShift(max_shift),
        sizes={"num_classes": num_classes},
    )


def idx(
    *,
    source: str,
    directory: str | None,
    image_size: int,
    num_classes: int,
    mean: float = 0.5,
    std: float = 0.5,
    max_shift: int = 2,
) -> Source:
    """The source of labelled square grey images in four IDX files, which are read into memory.

    Args:
      source: "embedded" is the only value, and says nothing here.
      directory: Holds train-images-idx3-ubyte, train-labels-idx1-ubyte, and the same two of t10k;
        with or without .gz.
      image_size: Height and width, in pixels.
      num_classes: Labels lie below it.
      mean: Subtracted from pixels over 255.
      std: Divides what is left.
      max_shift: Largest move of a training image by augmentation, in pixels.

    Raises:
      ConfigError: If an argument breaks its rule.
    """
    root = checked_directory("idx", source, directory)
    shape = (image_size, image_size)

    def read(name: str) -> np.ndarray:
        packed = root / f"{name}-ubyte.gz"
        return read_idx(packed if packed.exists() else root / f"{name}-ubyte")

    def examples(part: str) -> ImageExamples:
        images, labels = read(f"{part}-images-idx3"), read(f"{part}-labels-idx1")
        if images.shape[1:] != shape:
            raise DataError(
                f"{root}: {part} has images of shape {images.shape[1:]}, and image_size says "
                f"{shape}. Mend one of the two."
            )
        check_labels(labels, num_classes, where=root / f"{part}-labels-idx1-ubyte")
        return ImageExamples(images[..., None], labels, mean=mean, std=std)

    return Source(
        name="idx",
        spec={"image": ((*shape, 1), np.dtype("float32")), "label": ((), np.dtype("int32"))},
        load=lambda: make_data_set(f"idx {root}", examples("train"), examples("t10k")),
        augment=FlipAndShift(max_shift),
        sizes={"num_classes": num_classes},
    )


def npz(*, source: str, directory: str | None) -> Source:
    """The source of any arrays in a directory: all those of train.npz and of test.npz.

    Args:
      source: "embedded" is the only value, and says nothing here.
      directory: Holds the two files, of arrays that are equally long: one row an example.

    Raises:
      ConfigError: If an argument breaks its rule.
      DataError: If the files are missing or damaged, or no examples can be made of them.
    """
    root = checked_directory("npz", source, directory)
    train, test = (ArrayExamples(map_npz(root / f"{part}.npz")) for part in ("train", "test"))
    data = make_data_set(f"npz {root}", train, test)
    return Source("npz", spec_of(train), lambda: data)


def load_weights(path: Path) -> np.ndarray:
    """The numbers in a .npy file.

    Raises:
      DataError: If there is no such file, or it holds no numbers.
    """
    weights = map_npy(path)
    if weights.dtype.kind not in "iuf":
        raise DataError(f"{path}: {weights.dtype} are no weights. Write numbers.")
    return np.asarray(weights, np.float64)


def checked_directory(name: str, source: str, directory: str | None) -> Path:
    """The directory that a source of that name reads; it has no other parts."""
    if source != "embedded":
        raise ConfigError(f"data.source {source!r}: {name} has no such part. Leave it out.")
    if directory is None:
        raise ConfigError(f"data.name={name} reads a directory. Give data.dir.")
    return Path(directory)
