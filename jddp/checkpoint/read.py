"""Read parts of a checkpoint as host arrays, without the program that wrote it.

    values = read_newest(run_dir / "checkpoints", ["params", "model_state"])

Restoring a state to go on training needs a state to restore to. To look at a finished run it is
enough to have the values: any number of devices will do, the optimizer's state is not read, and
nothing that the run named is called.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jddp.errors import FileSystemError

PyTree = Any


def read_newest(directory: Path, fields: Sequence[str]) -> dict[str, PyTree]:
    """Returns fields of the newest state in `directory`, as nested dicts of numpy arrays.

    All keys of these dicts are strings, also where the state had numbers.

    Raises:
      FileSystemError: If there is no checkpoint, or it cannot be read.
    """
    try:
        steps = [int(path.name) for path in directory.iterdir() if path.name.isdecimal()]
    except OSError as error:
        raise FileSystemError(f"{directory} cannot be read: {error.strerror}.") from error
    if not steps:  # A checkpoint that is still being written has a longer name.
        raise FileSystemError(f"{directory} holds no finished checkpoint. Train first.")
    state = directory.resolve() / str(max(steps)) / "state"
    handler = ocp.PyTreeCheckpointHandler()
    try:
        saved = handler.metadata(state).tree
        item = {field: saved[field] for field in fields}
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        arguments = ocp.args.PyTreeRestore(item, restore_args=as_numpy, partial_restore=True)
        return dict(handler.restore(state, args=arguments))
    except (OSError, ValueError, KeyError) as error:
        raise FileSystemError(f"{state} cannot be read: {_first_line(error)}") from error
    finally:
        handler.close()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
