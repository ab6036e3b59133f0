"""Files that hold named arrays: safetensors and Flax's msgpack.

    file = Path("weights.safetensors")
    arrays = format_of(file).read(file)   # by their names

Both formats hold numbers and names, and no code. Beside the arrays `export` writes a JSON text,
which files of other programs lack.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.numpy
from flax import serialization
from flax.traverse_util import unflatten_dict

from jddp.engine.state import by_path
from jddp.errors import ConfigError
from jddp.typing import Settings

HostArrays = dict[str, np.ndarray]
KEY = "jddp"  # of the text
# Of files that name no dtypes of NumPy. https://github.com/huggingface/safetensors#format
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


class Format(NamedTuple):
    """Packs arrays and a JSON text into the bytes of a file, and parses a file into both.

    The text is returned as its object; None if the file has none.
    """

    pack: Callable[[HostArrays, str], bytes]
    parse: Callable[[Path], tuple[HostArrays, Settings | None]]

    def read(self, file: Path) -> HostArrays:
        """The arrays in a file, by their names.

        Raises:
          ValueError: If the digest of an array differs from the text.
        """
        arrays, about = self.parse(file)
        digests = (about or {}).get("digests")
        if digests is not None and digests != digests_of(arrays):
            raise ValueError("an array has changed since it was exported")
        return arrays


def digests_of(arrays: HostArrays) -> dict[str, str]:
    """The SHA-256 of each array's bytes."""
    return {name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in arrays.items()}


def format_of(file: Path) -> Format:
    """The format of a file, by its suffix.

    Raises:
      ConfigError: If the suffix is unknown.
    """
    if file.suffix not in FORMATS:
        raise ConfigError(f"{file}: unknown format. Use a name in {' or '.join(FORMATS)}.")
    return FORMATS[file.suffix]


def _pack_safetensors(arrays: HostArrays, about: str) -> bytes:
    try:
        return safetensors.numpy.save(arrays, metadata={KEY: about})
    except safetensors.SafetensorError as error:
        raise ConfigError(f"safetensors: {error}. Use a file name in .msgpack.") from error


def _read_safetensors(file: Path) -> tuple[HostArrays, Settings | None]:
    """The arrays lie in the file: each is read where it is used, and no other memory holds all."""
    with safetensors.safe_open(file, "numpy") as opened:  # which checks the header
        about = json.loads((opened.metadata() or {}).get(KEY, "null"))
    content = np.memmap(file, np.uint8, "r")
    begin = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:begin].tobytes())
    header.pop("__metadata__", None)
    dtypes = about["dtypes"] if about else {n: _DTYPES[x["dtype"]] for n, x in header.items()}
    arrays = {}
    for name, x in header.items():
        start, end = (begin + offset for offset in x["data_offsets"])
        arrays[name] = content[start:end].view(dtypes[name]).reshape(x["shape"])
    return arrays, about


def _pack_msgpack(arrays: HostArrays, about: str) -> bytes:
    return serialization.msgpack_serialize({**unflatten_dict(arrays, sep="/"), KEY: about})


def _read_msgpack(file: Path) -> tuple[HostArrays, Settings | None]:
    tree = serialization.msgpack_restore(file.read_bytes())
    about = json.loads(tree.pop(KEY, "null"))
    return by_path(tree), about


FORMATS: dict[str, Format] = {
    ".safetensors": Format(_pack_safetensors, _read_safetensors),
    ".msgpack": Format(_pack_msgpack, _read_msgpack),
}
