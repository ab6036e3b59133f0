"""Exports a checkpoint into one file of safetensors for other programs.

    export(folder, Path("weights.safetensors"), ["params", "model_state"])
    export_arrays(folder, Path("weights.safetensors"), {"fc.weight": kernel.T})

The format has no random keys, layouts, digests or run data: these are in a JSON text (`formats`).
"""

import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jddp.checkpoint.arrays import KEY_IMPLS, in_file, layouts_in
from jddp.checkpoint.formats import HostArrays, digests_of, pack_safetensors
from jddp.checkpoint.reader import read_arrays, read_described, read_object, read_values
from jddp.engine.state import Replicated, by_path
from jddp.errors import file_errors
from jddp.typing import Settings

# The fields of a state that a run evaluates.
EVALUATED = ["params", "ema_params", "model_state", "ema_state"]


def export(folder: Path, file: Path, fields: Sequence[str] | None = None) -> None:
    """Writes fields of a checkpoint's state into one file.

    Args:
      folder: Folder of the checkpoint.
      file: New file, `*.safetensors`.
      fields: Fields of the state, with the evaluated values; None for all, unmerged.

    Raises:
      ConfigError: If the suffix is another, or the format lacks a dtype.
      FileSystemError: If the checkpoint cannot be read, or the file cannot be written.
    """
    leaves = read_arrays(folder) if fields is None else by_path(read_values(folder, fields))
    layouts = dict.fromkeys(leaves, Replicated()) if fields else layouts_in(read_described(folder))
    keys = {name: impl for name, x in leaves.items() if (impl := KEY_IMPLS.get(str(x.dtype)))}
    arrays = {n: np.asarray(jax.random.key_data(x) if n in keys else x) for n, x in leaves.items()}
    _write(folder, file, arrays, {"keys": keys, "layouts": layouts})


def export_arrays(folder: Path, file: Path, arrays: HostArrays) -> None:
    """Writes arrays that were made of a checkpoint, with what is known of it.

    Args:
      folder: Folder of the checkpoint.
      file: New file, `*.safetensors`.
      arrays: Arrays by their names.

    Raises:
      ConfigError: If the suffix is another, or the format lacks a dtype.
      FileSystemError: If the file cannot be written.
    """
    _write(folder, file, arrays, {"keys": {}, "layouts": dict.fromkeys(arrays, Replicated())})


def _write(folder: Path, file: Path, arrays: HostArrays, about: Settings) -> None:
    text = {
        "step": int(folder.name),
        "dtypes": {name: x.dtype.name for name, x in arrays.items()},
        "digests": digests_of(arrays),
        **about,
        "run": read_object(folder / "run.json"),
    }
    # First, or a dtype that the format lacks would leave an empty file, which refuses the next try.
    packed = pack_safetensors(file, arrays, json.dumps(text, default=in_file))
    with file_errors(f"{file} cannot be written"), file.open("xb") as opened:
        opened.write(packed)
