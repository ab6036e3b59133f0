"""Memory-mapped arrays: .npy files, and .npz files that are not compressed.

    array = map_npy(Path("train_images.npy"))
    arrays = map_npz(Path("train.npz"))           # by name

No format here can hold a pickle. A mapped array that is pickled for another process is opened
there again, not copied.
"""

import mmap
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from jddp.errors import DataError


class MappedArray(np.memmap):
    """An array in a file, opened for reading; pickled as its path and offset."""

    def __reduce__(self) -> Any:
        if isinstance(self.base, mmap.mmap):
            place = (self.filename, self.dtype, "r", self.offset, self.shape, self._order)
            return MappedArray, place
        return np.array(self).__reduce__()  # a slice of one

    @property
    def _order(self) -> str:
        return "F" if self.flags.f_contiguous and not self.flags.c_contiguous else "C"


def map_npy(path: Path) -> np.ndarray:
    """The array in a .npy file.

    Raises:
      DataError: If the file is missing, is not whole, or holds objects.
    """
    return _map_at(path, 0, str(path))


def map_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays in a .npz file, by name; those that are compressed are read into memory.

    Raises:
      DataError: If the file is missing, is not whole, or holds objects.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return {
                member.filename.removesuffix(".npy"): _open_member(path, archive, member)
                for member in archive.infolist()
            }
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file. It is needed; see data.dir.") from error
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a whole .npz file ({error}). Write it again.") from error


def _open_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    where = f"{path}: {member.filename}"
    if member.compress_type != zipfile.ZIP_STORED:
        try:
            with archive.open(member) as file:
                return np.lib.format.read_array(file, allow_pickle=False)
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{where}: not a whole array ({error}). Write it again.") from error
    with path.open("rb") as file:
        file.seek(member.header_offset + 26)  # The local header ends with two lengths.
        name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
    return _map_at(path, member.header_offset + 30 + name_bytes + extra_bytes, where)


def _map_at(path: Path, offset: int, where: str) -> np.ndarray:
    """The array whose header begins at `offset`."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            version = np.lib.format.read_magic(file)
            read_header = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, is_fortran, dtype = read_header(file)
            begin, there = file.tell(), os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        raise DataError(f"{where}: no such file. It is needed; see data.dir.") from error
    except (OSError, ValueError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{where}: not a whole .npy file ({reason}). Write it again.") from error
    if dtype.hasobject:
        raise DataError(f"{where}: holds Python objects, which are not read. Write numbers.")
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if begin + num_bytes > there:
        raise DataError(
            f"{where}: cut off at byte {there:,} of {begin + num_bytes:,}. Write it again."
        )
    if num_bytes == 0:
        return np.zeros(shape, dtype)
    return MappedArray(path, dtype, "r", begin, shape, "F" if is_fortran else "C")
