"""Arrays in files: .npy, .npz and IDX; and refusals of files that are missing or damaged.

    array = map_npy(Path("train_images.npy"))     # memory-mapped
    arrays = map_npz(Path("train.npz"))           # by name, mapped unless they are compressed
    labels = read_idx(Path("train-labels-idx1-ubyte.gz"))

No format here can hold a pickle. If a mapped array is pickled for another process, it is opened
again there, and not copied.

An IDX file, the format of MNIST and its relatives, is a magic number (two zero bytes, a type, the
number of dims), one big-endian uint32 per dim, and the elements. Only bytes (type 8) are read here.

References:
  LeCun, Cortes and Burges, "The MNIST database of handwritten digits", section "file formats".
"""

import contextlib
import gzip
import importlib
import mmap
import os
import struct
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from math import prod
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic

from jddp.ground.errors import ConfigError, DataError, Error


class MappedArray(np.memmap):
    """An array in a file, opened for reading; pickled as its path and offset."""

    def __reduce__(self) -> str | tuple[object, ...]:
        if not isinstance(self.base, mmap.mmap):
            return np.array(self).__reduce__()  # a slice of one
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
    require_file(path)
    with refusing_damage(path, ".npz file"), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        return {x.filename.removesuffix(".npy"): _open_member(path, archive, x) for x in members}


def require_file(path: Path) -> None:
    """Refuses anything but a file: a read of a named pipe would wait for a writer forever.

    Raises:
      DataError: If the path is not a file.
    """
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: not a file, but a folder, a named pipe or a device. Replace it.")


def files_of(directory: Path, part: str, *endings: str) -> list[Path]:
    """The files of a part, "train" or "test", in the order of their names; of "", all.

    Raises:
      DataError: If there are none, or one is no file.
    """
    files = [path for end in endings for path in sorted(directory.glob(f"{part}*{end}"))]
    if not files:
        names = " or ".join(f"{part}*{end}" for end in endings)
        raise DataError(
            f"{directory}: no files {names}. Add them; without files for testing, give "
            "data.kwargs.test_share."
        )
    for path in files:
        require_file(path)
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
    require_file(path)
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


def read_idx(path: Path, *, sha256_hex: str | None = None) -> np.ndarray:
    """The array in an IDX file, read-only, after a check of its hash.

    Args:
      path: The file; gzipped if it ends in .gz.
      sha256_hex: Expected hash of the unpacked content (packed bytes differ between distributions
        of the same data). None accepts any.

    Raises:
      DataError: If the file is missing, incomplete, or holds anything else.
    """
    require_file(path)
    with refusing_damage(path, "gzip file" if path.suffix == ".gz" else "IDX file"):
        content = path.read_bytes()
        plain = gzip.decompress(content) if path.suffix == ".gz" else content
    digest = sha256(plain).hexdigest()
    if sha256_hex is not None and digest != sha256_hex:
        raise DataError(
            f"{path}: altered: unpacked, its sha256 is {digest[:12]}..., expected "
            f"{sha256_hex[:12]}.... Put the original in its place."
        )
    return parse_idx(plain, called=str(path))


def parse_idx(plain: bytes, *, called: str = "these bytes") -> np.ndarray:
    """The array in the unpacked bytes of an IDX file (read-only).

    Args:
      plain: The bytes.
      called: Name of the file in an error.

    Raises:
      DataError: If they are not exactly one IDX array of bytes.
    """
    num_dims = plain[3] if plain[:3] == b"\0\0\x08" and len(plain) > 3 else 0
    header_bytes = 4 + 4 * num_dims
    if not num_dims or len(plain) < header_bytes:
        raise DataError(f"{called}: not an IDX file of bytes: begins with 0x{plain[:4].hex()}.")
    shape = tuple(np.frombuffer(plain, ">u4", count=num_dims, offset=4).tolist())
    elements = np.frombuffer(plain, np.uint8, offset=header_bytes)
    if elements.size != prod(shape):
        raise DataError(
            f"{called}: not a whole IDX file: {elements.size:,} elements for shape {shape}."
        )
    return elements.reshape(shape)


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
