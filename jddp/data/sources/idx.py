"""Reads IDX files, gzipped or not, the format in which MNIST and its relatives are published.

A file is a magic number (two zero bytes, a type, the number of dims), one big-endian uint32 per
dim, and the elements. Only bytes (type 8) are read here.

References:
  LeCun, Cortes and Burges, "The MNIST database of handwritten digits", section "file formats".
"""

import gzip
from hashlib import sha256
from math import prod
from pathlib import Path

import numpy as np

from jddp.data.sources.mapped import refusing_damage, require_file
from jddp.errors import DataError


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
    found = sha256(plain).hexdigest()
    if sha256_hex is not None and found != sha256_hex:
        raise DataError(
            f"{path}: altered: unpacked, its sha256 is {found[:12]}..., expected "
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
