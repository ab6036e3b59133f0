"""Arrays in files: .npy, .npz, and Fashion-MNIST in IDX files; and refusals of damaged files.

    array = map_npy(Path("train_images.npy"))     # memory-mapped
    arrays = map_npz(Path("train.npz"))           # by name, mapped unless they are compressed

Sources read your arrays from a directory:

- `npy`: images and labels in train_images.npy, train_labels.npy, test_images.npy, test_labels.npy;
- `npz`: any arrays by name in train.npz and test.npz; compressed arrays are read at once.

Headers are checked when the files are opened, rows when they are read. No format here can hold a
pickle. If a mapped array is pickled for another process, it is opened again there, and not copied.

Fashion-MNIST has two sources, which are never mixed; neither replaces the other silently:

- `embedded`: the complete official test set (10,000 images, the original files) and 15,000 images
  of the official training set, 1,500 of each class, chosen by `scripts/make_fashion_mnist.py`.
- `full`: all 60,000 training images and the same test set, from a directory with the four original
  files; by default the directory of the Debian package `dataset-fashion-mnist`.

Each of their files is checked against its SHA-256. An IDX file is a magic number (two zero bytes, a
type, the number of dims), one big-endian uint32 per dim, and the elements. Only bytes (type 8) are
read here.

References:
  LeCun, Cortes and Burges, "The MNIST database of handwritten digits", section "file formats".
  Xiao, Rasul and Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
  Algorithms", 2017. https://arxiv.org/abs/1708.07747 (data: MIT licence, Zalando SE, see LICENSE)
"""

import contextlib
import gzip
import importlib
import mmap
import os
import struct
import zipfile
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic

from jddp.data.examples import ArrayExamples, Examples
from jddp.data.source import (
    DataSet,
    DataSource,
    image_spec,
    make_data_set,
    parts_of,
    source_of,
)
from jddp.data.transforms import FlipAndShift, Transformed, normalize
from jddp.ground.errors import ConfigError, DataError, Error, check_choice


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
    name, shape = f"npy {directory}", (image_size, image_size, num_channels)

    def read(part: str) -> Examples:
        images, labels = (map_npy(directory / f"{part}_{x}.npy") for x in ("images", "labels"))
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
        return image_examples(images, labels, mean=mean, std=std)

    return DataSource(
        image_spec(*shape),
        lambda: make_data_set(name, *parts_of(read, test_share)),
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
MEAN, STD = 0.2860, 0.3530  # Statistics of the 60,000 training images, over 255.

FOLDER = Path(__file__).parent / "fashion_mnist"
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
SUMS = {"embedded": FOLDER / "SHA256SUMS", "full": FOLDER / "SHA256SUMS.original"}


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
    check_choice("data.kwargs.source", source, tuple(SUMS))
    if directory is not None and source != "full":
        raise ConfigError(f"data.dir={directory} is not read with source 'embedded'. Leave it out.")
    if num_held_out < 0 or num_held_out % NUM_CLASSES:
        raise ConfigError(f"num_held_out {num_held_out} is not a multiple of {NUM_CLASSES}.")
    root = FOLDER if source == "embedded" else directory or _DEBIAN
    return DataSource(
        image_spec(28, 28, 1),
        lambda: _load(source, root, num_held_out),
        (FlipAndShift(max_shift),),
        {"num_classes": NUM_CLASSES},
    )


def _load(source: str, root: Path, num_held_out: int) -> DataSet:
    if source == "full" and not root.is_dir():
        raise DataError(
            f"{root}: no such directory, and source 'full' needs the four original files of "
            "Fashion-MNIST. Install the Debian package dataset-fashion-mnist, or give data.dir."
        )
    lines = [line.split() for line in SUMS[source].read_text().splitlines()]
    # Both lists are in this order, whatever the files are called.
    test_images, test_labels, train_images, train_labels = (
        _read_idx(root / f"{name}.gz", digest) for digest, name in lines
    )
    if num_held_out:
        is_kept = np.ones(len(train_labels), bool)
        for label in range(NUM_CLASSES):
            is_kept[np.flatnonzero(train_labels == label)[-(num_held_out // NUM_CLASSES) :]] = False
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
    check_per_channel(mean, std, images.shape[-1])
    if images.dtype == np.float16:
        images = images.astype(np.float32)
    stored = ArrayExamples({"image": images, "label": labels.astype(np.int32)})
    return stored if images.dtype.kind == "f" else Transformed(stored, normalize(mean, std))


def check_per_channel(
    mean: float | Sequence[float], std: float | Sequence[float], num_channels: int
) -> None:
    """Refuses anything but one number, or one for each channel of the images.

    Raises:
      DataError: If their number differs.
    """
    for name, numbers in (("mean", mean), ("std", std)):
        if np.shape(numbers) not in ((), (num_channels,)):
            raise DataError(
                f"{name} has {np.size(numbers)} numbers, but images have {num_channels} channels. "
                "Give one number, or one per channel."
            )


class MappedArray(np.memmap):
    """An array in a file, opened for reading; pickled as its path and offset."""

    def __reduce__(self) -> str | tuple[object, ...]:
        if not isinstance(self.base, mmap.mmap):
            return np.array(self).__reduce__()  # A slice is copied.
        order = "F" if self.flags.f_contiguous and not self.flags.c_contiguous else "C"
        return MappedArray, (self.filename, self.dtype, "r", self.offset, self.shape, order)


def map_npy(path: Path) -> np.ndarray:
    """The array in a .npy file.

    Raises:
      DataError: If the file is missing, is not whole, or holds objects.
    """
    return _map_at(path, 0, str(path))


def map_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays in a .npz file, by name; compressed arrays are read into memory.

    Raises:
      DataError: If the file is missing, is not whole, or holds objects.
    """
    with refusing_damage(path, ".npz file"), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        return {x.filename.removesuffix(".npy"): _open_member(path, archive, x) for x in members}


def files_of(directory: Path, part: str, *endings: str) -> list[Path]:
    """The files of a part, "train" or "test", in the order of their names; of "", all.

    Raises:
      DataError: If there are none.
    """
    files = [path for end in endings for path in sorted(directory.glob(f"{part}*{end}"))]
    if not files:
        names = " or ".join(f"{part}*{end}" for end in endings)
        raise DataError(
            f"{directory}: no files {names}. Add them; without files for testing, give "
            "data.kwargs.test_share."
        )
    return files


@contextlib.contextmanager
def refusing_damage(where: object, kind: str) -> Iterator[None]:
    """While open, errors from reading a missing or damaged file become a `DataError`."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{where}: no such file. It is needed; see data.dir.") from error
    except Error:
        raise
    except Exception as error:  # parsers raise anything for damaged files
        reason = str(error).partition("\n")[0]
        raise DataError(f"{where}: not a whole {kind} ({reason}). Write it again.") from error


def _open_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    where = f"{path}: {member.filename}"
    if member.compress_type != zipfile.ZIP_STORED:
        with refusing_damage(where, "array"), archive.open(member) as packed:
            return np.lib.format.read_array(packed, allow_pickle=False)
    with path.open("rb") as file:
        file.seek(member.header_offset + 26)  # The local header ends with two lengths.
        name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
    return _map_at(path, member.header_offset + 30 + name_bytes + extra_bytes, where)


def _map_at(path: Path, offset: int, where: str) -> np.ndarray:
    """The array whose header begins at `offset`."""
    with refusing_damage(where, ".npy file"), path.open("rb") as file:
        file.seek(offset)
        is_old = read_magic(file) == (1, 0)
        read_header = read_array_header_1_0 if is_old else read_array_header_2_0
        shape, is_fortran, dtype = read_header(file)
        begin = file.tell()
        num_bytes = os.fstat(file.fileno()).st_size
    if dtype.hasobject:
        raise DataError(f"{where}: holds Python objects, which are not read. Write numbers.")
    end = begin + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if end > num_bytes:
        raise DataError(f"{where}: cut off at byte {num_bytes:,} of {end:,}. Write it again.")
    if end == begin:
        return np.zeros(shape, dtype)
    return MappedArray(path, dtype, "r", begin, shape, "F" if is_fortran else "C")


def _read_idx(path: Path, sha256_hex: str) -> np.ndarray:
    """The array in a gzipped IDX file, whose unpacked content has this hash."""
    with refusing_damage(path, "gzip file"):
        plain = gzip.decompress(path.read_bytes())
    digest = sha256(plain).hexdigest()
    if digest != sha256_hex:  # packed bytes differ between distributions of the same data
        raise DataError(
            f"{path}: altered: unpacked, its sha256 is {digest[:12]}..., expected "
            f"{sha256_hex[:12]}.... Put the original in its place."
        )
    return parse_idx(plain)


def parse_idx(plain: bytes) -> np.ndarray:
    """The array in the unpacked bytes of a whole IDX file (read-only)."""
    num_dims = plain[3]
    shape = np.frombuffer(plain, ">u4", count=num_dims, offset=4).tolist()
    return np.frombuffer(plain, np.uint8, offset=4 + 4 * num_dims).reshape(shape)


def import_extra(name: str, *, needed_by: str) -> ModuleType:
    """The library with this name.

    Raises:
      ConfigError: If it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{needed_by} needs {name}, which is not installed: pip install 'jddp[data]'."
        ) from error
