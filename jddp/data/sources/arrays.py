"""Arrays in files: .npy, .npz, and Fashion-MNIST in IDX files; and refusals of damaged files.

    array = map_npy(Path("train_images.npy"))     # memory-mapped
    arrays = read_npz(Path("train.npz"))          # by name, in memory

Sources read your arrays from a directory:

- `npy`: images and labels in train_images.npy, train_labels.npy, test_images.npy, test_labels.npy;
- `npz`: any arrays by name in train.npz and test.npz.

Rows are checked when they are read. No format here can hold a pickle. If a mapped array is pickled
for another process, it is opened again there, and not copied.

Fashion-MNIST is the complete official test set (10,000 images) and 15,000 images of the official
training set, 1,500 of each class, chosen by `scripts/make_fashion_mnist.py`. An IDX file is a magic
number (two zero bytes, a type, the number of dims), one big-endian uint32 per dim, and the
elements. Only bytes (type 8) are read here.

References:
  LeCun, Cortes and Burges, "The MNIST database of handwritten digits", section "file formats".
  Xiao, Rasul and Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
  Algorithms", 2017. https://arxiv.org/abs/1708.07747 (data: MIT licence, Zalando SE, see LICENSE)
"""

import contextlib
import gzip
import importlib
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import numpy as np

from jddp.data import source
from jddp.data.examples import ArrayExamples, Examples
from jddp.data.transforms import FlipAndShift, Transformed, normalize
from jddp.ground.errors import ConfigError, DataError, Error


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
) -> source.DataSource:
    """The source of labelled square images in a directory.

    Args:
      directory: Folder of the four files: images `(n, size, size, channels)` in uint8, or in
        floating point and already normalized, and whole-number labels `(n,)`.
      image_size: Height and width, in pixels.
      num_classes: Number of classes.
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
        return image_examples(images, labels, mean=mean, std=std)

    return source.DataSource(
        source.image_spec(*shape),
        lambda: source.make_data_set(name, *source.parts_of(read, test_share)),
        (FlipAndShift(max_shift),),
        {"num_classes": num_classes},
    )


def npz(*, directory: Path, test_share: float | None = None) -> source.DataSource:
    """The source of all arrays in train.npz and test.npz in a directory.

    Args:
      directory: Folder of the two files; their arrays have one row per example.
      test_share: Fraction of the rows of train.npz that are for testing in place of test.npz.

    Raises:
      DataError: If the files are missing or damaged, or do not hold examples.
    """
    parts = source.parts_of(lambda part: read_npz(directory / f"{part}.npz"), test_share)
    return source.source_of(f"npz {directory}", *parts)


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
MEAN, STD = 0.2860, 0.3530  # Statistics of the 60,000 training images, over 255.

FOLDER = Path(__file__).parent / "fashion_mnist"
FILES = (
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
    "train-15000-images-idx3-ubyte",
    "train-15000-labels-idx1-ubyte",
)


def fashion_mnist(*, max_shift: int = 2) -> source.DataSource:
    """The source of Fashion-MNIST.

    Args:
      max_shift: Largest move of a training image by augmentation, in pixels.
    """

    def load() -> source.DataSet:
        files = [gzip.decompress((FOLDER / f"{name}.gz").read_bytes()) for name in FILES]
        arrays = map(parse_idx, files)
        test, train = (
            image_examples(images[..., None], labels, mean=MEAN, std=STD)
            for images, labels in zip(arrays, arrays, strict=True)
        )
        digest = sha256("".join(sha256(file).hexdigest() for file in files).encode()).hexdigest()
        name = "Fashion-MNIST embedded"
        return source.make_data_set(name, train, test, sha256_hex=digest, classes=CLASSES)

    sizes = {"num_classes": len(CLASSES)}
    return source.DataSource(source.image_spec(28, 28, 1), load, (FlipAndShift(max_shift),), sizes)


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
    has_images = images.ndim == 4 and (images.dtype == np.uint8 or images.dtype.kind == "f")
    if not has_images or labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise DataError(
            f"images are {images.dtype}{images.shape} and labels {labels.dtype}{labels.shape}. "
            "They need uint8 or floats (n, height, width, channels), and whole numbers (n,)."
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
    """An array in a file, opened for reading; pickled as its path."""

    def __reduce__(self) -> str | tuple[object, ...]:
        if type(self.base) is not np.memmap or not self.size:
            return np.array(self).__reduce__()  # Slices are copied.
        return map_npy, (Path(str(self.filename)),)


def map_npy(path: Path) -> np.ndarray:
    """The array in a .npy file.

    Raises:
      DataError: If the file is missing, is not whole, or holds objects.
    """
    with refusing_damage(path, ".npy file"):
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        return array.view(MappedArray)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays in a .npz file, by name.

    Raises:
      DataError: If the file is missing, is not whole, or holds objects.
    """
    with refusing_damage(path, ".npz file"), np.load(path, allow_pickle=False) as archive:
        return dict(archive)


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
