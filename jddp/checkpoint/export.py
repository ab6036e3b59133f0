"""Exports a checkpoint into one file for other programs, and imports it again.

    export(folder, Path("weights.safetensors"), ["params", "model_state"])
    import_file(Path("weights.safetensors"), directory)

The formats (`formats`) have no random keys, layouts, digests or run data: these are in a text of
JSON.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from jddp.checkpoint.arrays import KEY_IMPLS, by_path, in_file, layout_of, layouts_in
from jddp.checkpoint.checkpoints import Checkpoints
from jddp.checkpoint.formats import digests_of, format_of
from jddp.checkpoint.lock import InUse, held
from jddp.checkpoint.reader import read, read_described, read_object, read_values
from jddp.engine.mesh import make_mesh, replicate
from jddp.engine.state import Replicated
from jddp.errors import ConfigError, DataError, FileSystemError, file_errors, words_of


def export(folder: Path, file: Path, fields: Sequence[str] | None = None) -> None:
    """Writes fields of a checkpoint's state into one file.

    Args:
      folder: Folder of the checkpoint.
      file: New file, whose suffix is that of the format.
      fields: Fields of the state, with the values that are evaluated; None for all, unmerged.

    Raises:
      ConfigError: If the suffix is unknown, or the format lacks a dtype.
      FileSystemError: If the checkpoint cannot be read, or the file cannot be written.
    """
    pack = format_of(file).pack
    leaves = read(folder) if fields is None else by_path(read_values(folder, fields))
    layouts = dict.fromkeys(leaves, Replicated()) if fields else layouts_in(read_described(folder))
    keys = {name: impl for name, x in leaves.items() if (impl := KEY_IMPLS.get(str(x.dtype)))}
    arrays = {n: np.asarray(jax.random.key_data(x) if n in keys else x) for n, x in leaves.items()}
    about = {
        "step": int(folder.name),
        "dtypes": {name: x.dtype.name for name, x in arrays.items()},
        "digests": digests_of(arrays),
        "keys": keys,
        "layouts": layouts,
        "run": read_object(folder / "run.json"),
    }
    # First, or a dtype that the format lacks would leave an empty file, which refuses the next try.
    packed = pack(arrays, json.dumps(about, default=in_file))
    with file_errors(f"{file} cannot be written"), file.open("xb") as opened:
        opened.write(packed)


def import_file(file: Path, directory: Path) -> int:
    """Makes a checkpoint from a file of `export`; returns its step.

    Args:
      file: The file, whose suffix is that of its format.
      directory: Directory of checkpoints; one of the same step is replaced.

    Raises:
      ConfigError: If the suffix is unknown, or a run is using the directory.
      DataError: If the file holds something else, or an array of it has changed.
      FileSystemError: If it cannot be read, or the checkpoint cannot be written.
    """
    read_file = format_of(file).read
    try:
        arrays, about = read_file(file)
        step, run, keys = int(about["step"]), about["run"], about["keys"]
        saved = about["layouts"]
        layouts = {name: layout_of(saved[name], x.shape) for name, x in arrays.items()}
        rngs = {n: jax.random.wrap_key_data(jax.device_put(arrays[n]), impl=keys[n]) for n in keys}
    except OSError as error:
        raise FileSystemError(f"{file} cannot be read: {words_of(error)}.") from error
    except Exception as error:  # parsers raise anything for foreign files
        raise DataError(f"{file} is no export of a checkpoint: {error!r}.") from error
    with _unused(directory), contextlib.closing(Checkpoints(directory, keep=2**62)) as checkpoints:
        checkpoints.save(step, replicate(arrays | rngs, make_mesh(1)), run, layouts)
    return step


@contextlib.contextmanager
def _unused(directory: Path) -> Iterator[None]:
    """While open, no run begins in the run directory that these checkpoints are of, if any.

    Raises:
      ConfigError: If one is running there.
    """
    run_dir = directory.absolute().parent
    if not (run_dir / "manifest.json").exists():  # which every run directory has
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            with file_errors(f"{run_dir / 'lock'} cannot be opened"):
                stack.enter_context(held(run_dir / "lock"))
        except InUse as holder:
            raise ConfigError(
                f"{run_dir} is in use by {holder}, which writes its own checkpoints there. Wait "
                "for its end, or import into another directory."
            ) from None
        yield
