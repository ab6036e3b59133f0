"""Read parts of a checkpoint as host arrays, without the program that wrote it.

    values = read_newest(run_dir / "checkpoints", ["params", "model_state"])

Restoring a state to go on training needs a state to restore to. To look at a finished run it is
enough to have the values: any number of devices will do, the optimizer's state is not read, nothing
that the run named is called, and nothing is written: a damaged checkpoint is passed over.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jddp.checkpoint.arrays import as_saved, nested
from jddp.checkpoint.steps import finished
from jddp.checkpoint.sums import find_damage
from jddp.errors import FileSystemError

PyTree = Any


def read_newest(directory: Path, fields: Sequence[str]) -> dict[str, PyTree]:
    """Returns fields of the newest state in `directory` whose digests hold.

    Raises:
      FileSystemError: If there is no such checkpoint, or it cannot be read.
    """
    return read(directory / str(newest_sound(directory)), fields)


def newest_sound(directory: Path) -> int:
    """The newest step whose files are what was written.

    Raises:
      FileSystemError: If there is none.
    """
    try:
        steps = finished(directory)
    except OSError as error:
        raise FileSystemError(f"{directory} cannot be read: {error.strerror}.") from error
    if not steps:
        raise FileSystemError(f"{directory} holds no finished checkpoint. Train first.")
    for step in reversed(steps):
        damage = find_damage(directory / str(step))
        if damage is None:
            return step
        logging.getLogger("jddp").error("%s is passed over: %s.", directory / str(step), damage)
    raise FileSystemError(f"{directory} holds no checkpoint that can be trusted.")


def read(folder: Path, fields: Sequence[str] | None = None) -> dict[str, PyTree]:
    """Returns fields of the state in one checkpoint, as nested dicts of numpy arrays.

    All keys of these dicts are strings, also where the state had numbers; random keys are JAX's.

    Args:
      folder: Of the checkpoint.
      fields: Of the state; None for all.

    Raises:
      FileSystemError: If it cannot be read.
    """
    state = epath.Path(folder.absolute()) / "state"
    handler = ocp.PyTreeCheckpointHandler()
    try:
        described = json.loads((folder / "arrays.json").read_text())
        chosen = [n for n in described if fields is None or n.partition("/")[0] in fields]
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in chosen}
        arguments = ocp.args.PyTreeRestore(
            dict.fromkeys(chosen, 0), restore_args=as_numpy, partial_restore=True
        )
        arrays = handler.restore(state, args=arguments)
        leaves = {name: as_saved(arrays[name], described[name]["dtype"]) for name in chosen}
        return {field: {} for field in fields or ()} | nested(leaves)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().partition("\n")[0]
        raise FileSystemError(f"{state} cannot be read: {first}") from error
    finally:
        handler.close()
