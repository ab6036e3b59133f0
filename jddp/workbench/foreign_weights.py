"""Arrays in files that other libraries write: state dicts of PyTorch, folders of the Hub.

A folder of the Hugging Face Hub holds model.safetensors; or, of a large model, several such files,
and an index: {"weight_map": {"wte.weight": "model-00001-of-00002.safetensors", ...}}. It reads
numbers and names, and runs no code.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jddp.checkpoint.reader import read_object
from jddp.checkpoint.weights import INDEX, WHOLE, HostArrays, read_file
from jddp.ground.errors import ConfigError

# Keys under which PyTorch's files of a whole training have the model's state dict.
_INSIDE = ("state_dict", "model")


def read_foreign(path: Path) -> HostArrays:
    """The arrays of a folder of the Hub, or of a file of PyTorch, by their names.

    Raises:
      ConfigError: If PyTorch is needed, and not installed.
      ValueError: If a file of the folder is missing.
    """
    return _read_hub_folder(path) if path.is_dir() else _read_pytorch(path)


def _read_hub_folder(folder: Path) -> HostArrays:
    if (folder / WHOLE).exists():
        return read_file(folder / WHOLE)
    if not (folder / INDEX).exists():
        raise ValueError(f"{INDEX}, which lists its files, is missing; fetch the whole folder")
    places: dict[str, str] = read_object(folder / INDEX)["weight_map"]
    files = {*places.values()}
    if absent := [x for x in files if Path(x).name != x or not (folder / x).exists()]:
        raise ValueError(f"{INDEX} lists {absent[0]}, which is not there; fetch the whole folder")
    shards = {file: read_file(folder / file) for file in files}
    return {name: shards[file][name] for name, file in places.items()}


def _read_pytorch(file: Path) -> HostArrays:
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
    return {k: x.view("bfloat16") if k in halves else x for k, x in arrays.items()}
