"""Files that hold named arrays: safetensors and Flax's msgpack.

    format_of(Path("weights.safetensors")).unpack(packed)   # arrays by their names, and a text

Both formats hold numbers and names, and no code. Beside the arrays `export` writes a text of JSON,
which files of other programs lack.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.flax
import safetensors.numpy
from flax import serialization
from flax.traverse_util import unflatten_dict

from jddp.checkpoint.arrays import by_path
from jddp.errors import ConfigError

Arrays = dict[str, np.ndarray]
KEY = "jddp"  # of the text


class Format(NamedTuple):
    """Functions from arrays and a text to bytes; and back, with the object of the text, or None."""

    pack: Callable[[Arrays, str], bytes]
    unpack: Callable[[bytes], tuple[Arrays, Any]]


def format_of(file: Path) -> Format:
    """The format of a file, by its suffix.

    Raises:
      ConfigError: If the suffix is unknown.
    """
    if file.suffix not in FORMATS:
        raise ConfigError(f"{file} has no known format. Let it end in {' or '.join(FORMATS)}.")
    return FORMATS[file.suffix]


def _pack_safetensors(arrays: Arrays, about: str) -> bytes:
    try:
        return safetensors.numpy.save(arrays, metadata={KEY: about})
    except safetensors.SafetensorError as error:
        raise ConfigError(f"safetensors: {error}. Let the file end in .msgpack.") from error


def _unpack_safetensors(packed: bytes) -> tuple[Arrays, Any]:
    size = int.from_bytes(packed[:8], "little")
    metadata = json.loads(packed[8 : 8 + size]).get("__metadata__", {})
    if KEY not in metadata:
        return {name: np.asarray(x) for name, x in safetensors.flax.load(packed).items()}, None
    about = json.loads(metadata[KEY])
    arrays = {
        name: np.frombuffer(x["data"], about["dtypes"][name]).reshape(x["shape"])
        for name, x in safetensors.deserialize(packed)
    }
    return arrays, about


def _pack_msgpack(arrays: Arrays, about: str) -> bytes:
    return serialization.msgpack_serialize({**unflatten_dict(arrays, sep="/"), KEY: about})


def _unpack_msgpack(packed: bytes) -> tuple[Arrays, Any]:
    tree = serialization.msgpack_restore(packed)
    about = json.loads(tree.pop(KEY, "null"))
    return by_path(tree), about


FORMATS: dict[str, Format] = {
    ".safetensors": Format(_pack_safetensors, _unpack_safetensors),
    ".msgpack": Format(_pack_msgpack, _unpack_msgpack),
}
