"""Weights in files: reads a tree from a file or folder, and exports one.

    tree = read_weights(Path("weights.safetensors"))
    export(folder, Path("weights.safetensors"), ["params", "model_state"])

It reads safetensors and the checkpoints of a run; other files and folders by the entry point
"foreign-weights". It reads numbers and names, and runs no code. It writes safetensors, with the
step and the run data as a JSON text in their metadata.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import safetensors.numpy
from flax.traverse_util import unflatten_dict

from jddp.checkpoint.folders import directory_of, first_line
from jddp.checkpoint.reader import read_newest, read_object, read_values
from jddp.engine.mesh import is_key
from jddp.engine.state import by_path
from jddp.ground.errors import ConfigError, DataError, FileSystemError, UsageError, file_errors
from jddp.ground.files import expand
from jddp.ground.names import tool
from jddp.ground.typing import PyTree

HostArrays = dict[str, np.ndarray]
KEY = "jddp"  # Key of that text in the metadata.
WRITTEN = ".safetensors"
SUFFIXES = (WRITTEN, ".pt", ".pth", ".bin")
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The fields of a state that a run evaluates.
EVALUATED = ["params", "ema_params", "model_state", "ema_state"]


def read_weights(named: str | Path) -> PyTree:
    """The arrays in a file or folder, as nested dicts by the parts of their names.

    Names are split at "/", or at "." if no name has a "/". From a run it reads the parameters and
    the model's other state, in the newest checkpoint with valid digests.

    Raises:
      ConfigError: If the format is unknown.
      DataError: If the file is damaged, or holds something else.
      FileSystemError: If it cannot be read.
    """
    path = expand(named)
    if not path.exists():
        raise FileSystemError(f"{path} does not exist.")
    if is_run_folder(path):
        return read_newest(directory_of(path), ["params", "model_state"])
    if not (path.is_dir() or path.suffix in SUFFIXES):
        raise ConfigError(
            f"{path}: unknown format. Weights are read from {', '.join(SUFFIXES)}, a run directory "
            "or a folder of the Hugging Face Hub."
        )
    try:
        read = read_file if path.suffix == WRITTEN else tool("foreign-weights", f"reading {path}")
        arrays = read(path)
        return unflatten_dict(arrays, sep="/" if any("/" in name for name in arrays) else ".")
    except (ConfigError, UsageError):
        raise
    except OSError as error:
        raise FileSystemError(f"{path} cannot be read: {first_line(error)}") from error
    except Exception as error:  # Parsers raise anything for foreign files.
        raise DataError(f"{path} holds no weights: {first_line(error)}") from error


def is_run_folder(path: Path) -> bool:
    """Whether a path can only be a run directory, or a folder of checkpoints."""
    is_of_hub = (path / INDEX).exists() or any(path.glob("model*.safetensors"))
    return path.is_dir() and not is_of_hub


def read_file(file: Path) -> HostArrays:
    """The arrays in a file of safetensors, by their names."""
    with safetensors.safe_open(file, "numpy") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def export(folder: Path, file: Path, fields: Sequence[str] = EVALUATED) -> None:
    """Writes the evaluated values of a checkpoint's fields into one file.

    Args:
      folder: Folder of the checkpoint.
      file: New file, `*.safetensors`.
      fields: Fields of the state.

    Raises:
      ConfigError: If the suffix is another, or the format lacks a dtype.
      FileSystemError: If the checkpoint cannot be read, or the file cannot be written.
    """
    values = read_values(folder, fields)
    words = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, values)
    export_arrays(folder, file, by_path(jax.tree.map(np.asarray, words)))


def export_arrays(folder: Path, file: Path, arrays: HostArrays) -> None:
    """Writes arrays that were made from a checkpoint, with its step and its run data.

    Args:
      folder: Folder of the checkpoint.
      file: New file, `*.safetensors`.
      arrays: Arrays by their names.

    Raises:
      ConfigError: If the suffix is another, or the format lacks a dtype.
      FileSystemError: If the file cannot be written.
    """
    if file.suffix != WRITTEN:
        raise ConfigError(
            f"{file}: unknown format. Use a name in {WRITTEN}, which PyTorch reads too."
        )
    about = {"step": int(folder.name), "run": read_object(folder / "run.json")}
    try:
        # transformers refuses a file that names no format; "pt" is its word for plain arrays.
        metadata = {KEY: json.dumps(about), "format": "pt"}
        packed = safetensors.numpy.save(arrays, metadata=metadata)
    except safetensors.SafetensorError as error:
        raise ConfigError(
            f"{file}: {error}. Cast these arrays, or use the run directory itself: model.init_from "
            "and init(params=) read it."
        ) from error
    with file_errors(f"{file} cannot be written"), file.open("xb") as opened:
        opened.write(packed)
