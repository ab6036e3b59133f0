"""A user's own arrays in a directory, memory-mapped: larger than memory is fine.

- `npy`: images and labels in train_images.npy, train_labels.npy, test_images.npy, test_labels.npy;
- `tokens`: one long row of uint16 or uint32 in each of train.npy and test.npy.

Headers are checked when the files are opened, rows when they are read. The hash of such data is
of its sizes and of the rows at both ends: reading all of it could take hours.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jddp.data.augment import FlipAndShift
from jddp.data.examples import Examples, ImageExamples, TokenExamples, check_labels
from jddp.data.source import Source, make_data_set
from jddp.data.stdlib_text import check_sequence_length
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
    root = _directory("npy", source, directory)
    shape = (image_size, image_size, num_channels)

    def examples(part: str) -> ImageExamples:
        images = _open(root / f"{part}_images.npy")
        labels = _open(root / f"{part}_labels.npy")
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
    )


def tokens(
    *, source: str, directory: str | None, sequence_length: int, vocab_size: int | None = None
) -> Source:
    """The source of tokens in a directory.

    Args:
      source: "embedded" is the only value, and says nothing here.
      directory: Holds train.npy and test.npy.
      sequence_length: Tokens that are predicted per example.
      vocab_size: Refuses tokens that do not lie below it.

    Raises:
      ConfigError: If an argument breaks its rule.
    """
    root = _directory("tokens", source, directory)
    check_sequence_length(sequence_length)

    def examples(part: str) -> Examples:
        path = root / f"{part}.npy"
        try:
            return TokenExamples(
                _open(path), sequence_length=sequence_length, vocab_size=vocab_size
            )
        except DataError as error:
            raise DataError(f"{path}: {error}") from error

    return Source(
        name="tokens",
        spec={"tokens": ((sequence_length + 1,), np.dtype("int32"))},
        load=lambda: make_data_set(f"tokens {root}", examples("train"), examples("test")),
    )


def load_weights(path: Path) -> np.ndarray:
    """The numbers in a .npy file.

    Raises:
      DataError: If there is no such file, or it holds no numbers.
    """
    weights = _open(path)
    if weights.dtype.kind not in "iuf":
        raise DataError(f"{path}: {weights.dtype} are no weights. Write numbers.")
    return np.asarray(weights, np.float64)


def _directory(name: str, source: str, directory: str | None) -> Path:
    if source != "embedded":
        raise ConfigError(f"data.source {source!r}: {name} has no such part. Leave it out.")
    if directory is None:
        raise ConfigError(f"data.name={name} reads a directory. Give data.dir.")
    return Path(directory)


def _open(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file. It is needed; see data.dir.") from error
    except (OSError, ValueError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: not a whole .npy file ({reason}). Write it again.") from error
