"""Fashion-MNIST: 28 x 28 grey images of clothes in ten classes, in this folder.

There are two sources, which are never mixed; neither replaces the other silently:

- `embedded`: the complete official test set (10,000 images, the original files) and 15,000 images
  of the official training set, 1,500 of each class, chosen by `scripts/make_fashion_mnist.py`.
- `full`: all 60,000 training images and the same test set, from a directory with the four original
  files; by default the directory of the Debian package `dataset-fashion-mnist`.

Every file is checked against its SHA-256 before it is used.

References:
  Xiao, Rasul and Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
  Algorithms", 2017. https://arxiv.org/abs/1708.07747 (data: MIT licence, Zalando SE, see LICENSE)
"""

import functools
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import numpy as np

from jddp.data.source import DataSet, DataSource, image_spec
from jddp.data.sources.files import read_idx
from jddp.data.sources.images import image_examples
from jddp.data.transforms import FlipAndShift
from jddp.ground.errors import ConfigError, DataError

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
NUM_CLASSES = len(CLASSES)
MEAN, STD = 0.2860, 0.3530  # of the pixels of the 60,000 training images, over 255

_HERE = Path(str(files(__name__)))
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_SUMS = {"embedded": _HERE / "SHA256SUMS", "full": _HERE / "SHA256SUMS.original"}


def fashion_mnist(
    *,
    source: str = "embedded",
    directory: Path | None = None,
    num_held_out: int = 0,
    max_shift: int = 2,
) -> DataSource:
    """The source of Fashion-MNIST.

    Args:
      source: "embedded" or "full".
      directory: Folder of the four original files, for "full" only.
      num_held_out: Number of training examples, equally many of each class, that are held out and
        replace the test set, so that you can tune without it. A multiple of ten.
      max_shift: Largest move of a training image by augmentation, in pixels.

    Raises:
      ConfigError: If an argument breaks its rule.
    """
    if source not in _SUMS:
        raise ConfigError(f"source '{source}' of fashion_mnist is neither 'embedded' nor 'full'.")
    if directory is not None and source != "full":
        raise ConfigError(
            f"directory '{directory}' is not read with source 'embedded'. Choose source 'full', "
            "or leave the directory out."
        )
    if num_held_out < 0 or num_held_out % NUM_CLASSES:
        raise ConfigError(
            f"num_held_out {num_held_out} is not a multiple of {NUM_CLASSES} (classes)."
        )
    root = _HERE if source == "embedded" else directory or _DEBIAN
    load = functools.partial(_load, source, root, num_held_out)
    spec = image_spec(28, 28, 1)
    sizes = {"num_classes": NUM_CLASSES}
    return DataSource(spec, load, (FlipAndShift(max_shift),), sizes)


def _load(source: str, root: Path, num_held_out: int) -> DataSet:
    if source == "full" and not root.is_dir():
        raise DataError(
            f"{root}: no such directory, and source 'full' needs the four original files of "
            "Fashion-MNIST. Install the Debian package dataset-fashion-mnist, or give data.dir."
        )
    lines = [line.split() for line in _SUMS[source].read_text().splitlines()]
    # Both lists are in this order, whatever the files are called.
    test_images, test_labels, train_images, train_labels = (
        read_idx(root / f"{name}.gz", sha256_hex=digest) for digest, name in lines
    )
    if num_held_out:
        is_kept = ~_last_of_each_class(train_labels, num_held_out // NUM_CLASSES)
        test_images, test_labels = train_images[~is_kept], train_labels[~is_kept]
        train_images, train_labels = train_images[is_kept], train_labels[is_kept]
    train, test = (
        image_examples(images[..., None], labels, mean=MEAN, std=STD)
        for images, labels in ((train_images, train_labels), (test_images, test_labels))
    )
    judged = f"{len(test):,} {'held-out' if num_held_out else 'test'}"
    description = f"Fashion-MNIST {source}: {len(train):,} train / {judged} examples"
    digest = sha256("".join(digest for digest, _ in lines).encode()).hexdigest()
    return DataSet(train, test, description, digest, CLASSES)


def _last_of_each_class(labels: np.ndarray, num_of_each: int) -> np.ndarray:
    """Whether each example is one of the last of its class."""
    is_last = np.zeros(len(labels), bool)
    for label in range(NUM_CLASSES):
        is_last[np.flatnonzero(labels == label)[-num_of_each:]] = True
    return is_last
