"""Files that hold named arrays: safetensors, and PyTorch's, which are only read.

    arrays = read_file(Path("weights.safetensors"))   # by their names

The formats hold numbers and names; code in a file of PyTorch is not run. Beside the arrays `export`
writes a JSON text, which files of other programs lack.

A folder of the Hugging Face Hub holds model.safetensors; or, of a large model, several such files,
and an index: {"weight_map": {"wte.weight": "model-00001-of-00002.safetensors", ...}}.
"""

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from jddp.checkpoint.reader import read_object
from jddp.errors import ConfigError
from jddp.typing import Settings

HostArrays = dict[str, np.ndarray]
KEY = "jddp"  # of the text
WRITTEN = ".safetensors"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Where PyTorch's files of a whole training have the model's state dict.
_INSIDE = ("state_dict", "model")
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


def read_file(file: Path) -> HostArrays:
    """The arrays in a file, by their names; its suffix is one of `SUFFIXES`.

    Raises:
      ValueError: If the digest of an array differs from the text.
    """
    arrays, about = _PARSERS[file.suffix](file)
    digests = (about or {}).get("digests")
    if digests is not None and digests != digests_of(arrays):
        raise ValueError("an array has changed since it was exported")
    return arrays


def digests_of(arrays: HostArrays) -> dict[str, str]:
    """The SHA-256 of each array's bytes."""
    return {name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in arrays.items()}


def pack_safetensors(file: Path, arrays: HostArrays, about: str) -> bytes:
    """The content of a new file of safetensors, with a JSON text.

    Raises:
      ConfigError: If the file has another suffix, or the format lacks a dtype.
    """
    if file.suffix != WRITTEN:
        raise ConfigError(
            f"{file}: unknown format. Use a name in {WRITTEN}, which PyTorch reads too."
        )
    try:
        # transformers refuses a file that names no format; "pt" is its word for plain arrays.
        return safetensors.numpy.save(arrays, metadata={KEY: about, "format": "pt"})
    except safetensors.SafetensorError as error:
        raise ConfigError(
            f"{file}: {error}. Cast these arrays, or use the run directory itself: model.init_from "
            "and init(params=) read it."
        ) from error


def is_hub_folder(folder: Path) -> bool:
    """Whether a folder has weights as on the Hugging Face Hub, or a part of them."""
    return (folder / INDEX).exists() or any(folder.glob("model*.safetensors"))


def read_hub_folder(folder: Path) -> HostArrays:
    """The arrays in such a folder, by their names.

    Raises:
      ValueError: If the index, a file that it lists, or an array in that file is missing.
    """
    if (folder / WHOLE).exists():
        return read_file(folder / WHOLE)
    if not (folder / INDEX).exists():
        found = min(x.name for x in folder.glob("model*.safetensors"))
        raise ValueError(
            f"{found} is one of several files, and {INDEX}, which lists them, is missing; fetch "
            "the whole folder"
        )
    places: dict[str, str] = read_object(folder / INDEX).get("weight_map") or {}
    if not places:
        raise ValueError(f"{INDEX} has no weight_map, which names the file of each array")
    shards = {file: _read_shard(folder, file) for file in sorted({*places.values()})}
    if absent := [name for name, file in places.items() if name not in shards[file]]:
        raise ValueError(f"{absent[0]} is not in {places[absent[0]]}, where {INDEX} has it")
    return {name: shards[file][name] for name, file in places.items()}


def _read_shard(folder: Path, file: str) -> HostArrays:
    if Path(file).name != file or not (folder / file).exists():
        raise ValueError(f"{INDEX} lists {file}, which is not there; fetch the whole folder")
    return read_file(folder / file)


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


def _read_pytorch(file: Path) -> tuple[HostArrays, None]:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise ConfigError(
            f"{file} can only be read by PyTorch, which is not installed: pip install torch. Or "
            "save the state dict as .safetensors, by safetensors.torch.save_file."
        ) from error
    saved = torch.load(file, map_location="cpu", weights_only=True)
    inside = [saved[key] for key in _INSIDE if isinstance(saved.get(key), Mapping)]
    found = {k: x for k, x in [*inside, saved][0].items() if isinstance(x, torch.Tensor)}
    tensors = {name: x.detach() for name, x in found.items()}
    # NumPy itself has no bfloat16.
    halves = {k: x.view(torch.int16) for k, x in tensors.items() if x.dtype == torch.bfloat16}
    arrays = {name: x.numpy() for name, x in (tensors | halves).items()}
    return {k: x.view("bfloat16") if k in halves else x for k, x in arrays.items()}, None


_PARSERS: dict[str, Callable[[Path], tuple[HostArrays, Settings | None]]] = {
    WRITTEN: _read_safetensors,
    **dict.fromkeys((".pt", ".pth", ".bin"), _read_pytorch),
}
SUFFIXES = tuple(_PARSERS)
