#!/usr/bin/env python
"""Makes the Fashion-MNIST files that are shipped inside jddp from the four original ones.

    python scripts/make_fashion_mnist.py [ORIGINALS [DESTINATION]]

ORIGINALS is where the Debian package `dataset-fashion-mnist` puts them by default, DESTINATION is
jddp/data/sources/fashion_mnist. The test set is copied byte for byte. Of the training set, 1,500
images of each of the ten classes are kept, in their original order; which ones is decided by
sorting the images of a class by the SHA-256 of their pixels, so that anybody can repeat the choice
in any language, without a random number generator. Sums are of the unpacked files.
"""

import gzip
import shutil
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np

from jddp.data.sources.arrays import parse_idx

NUM_PER_CLASS = 1500
ORIGINALS = Path("/usr/share/datasets/fashion-mnist")
DESTINATION = Path(__file__).parents[1] / "jddp" / "data" / "sources" / "fashion_mnist"

TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
KEPT = ("train-15000-images-idx3-ubyte", "train-15000-labels-idx1-ubyte")


def choose(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Indices of the images to keep, in their original order."""
    digests = [sha256(image.tobytes()).digest() for image in images]
    kept = []
    for label in range(10):
        members = np.flatnonzero(labels == label)
        kept += sorted(members, key=digests.__getitem__)[:NUM_PER_CLASS]
    return np.sort(kept)


def unpack(path: Path) -> bytes:
    """The unpacked bytes of one gzipped file."""
    return gzip.decompress(path.read_bytes())


def pack(array: np.ndarray) -> bytes:
    """The bytes of a gzipped IDX file that holds this array of bytes."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return gzip.compress(header + array.astype(np.uint8).tobytes(), compresslevel=9, mtime=0)


def write_sums(directory: Path, names: tuple[str, ...], manifest: Path) -> None:
    """Writes the SHA-256 of each unpacked file as `sha256sum` would."""
    sums = (f"{sha256(unpack(directory / f'{name}.gz')).hexdigest()}  {name}\n" for name in names)
    manifest.write_text("".join(sums))


def main(originals: Path = ORIGINALS, destination: Path = DESTINATION) -> None:
    """Writes five files into `destination`: the data and its sums."""
    for name in TEST:
        shutil.copyfile(originals / f"{name}.gz", destination / f"{name}.gz")
    images, labels = (parse_idx(unpack(originals / f"{name}.gz")) for name in TRAIN)
    kept = choose(images, labels)
    for name, array in zip(KEPT, (images, labels), strict=True):
        (destination / f"{name}.gz").write_bytes(pack(array[kept]))
    write_sums(destination, TEST + KEPT, destination / "SHA256SUMS")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
