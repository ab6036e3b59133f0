"""One file of a checkpoint, for other programs: safetensors or Flax's msgpack; and back.

    export(folder, Path("weights.safetensors"), ["params", "model_state"])
    import_file(Path("weights.safetensors"), directory)

Both formats hold numbers and names, and no code. What they lack, random keys and what was saved
beside the arrays, stands in one text of JSON, under "jddp".
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from flax import serialization

from jddp.checkpoint.arrays import by_path, in_file, layout_of, layouts_in, nested
from jddp.checkpoint.reader import read, read_described, read_object, read_values
from jddp.checkpoint.writer import Keep, Writer
from jddp.engine.mesh import make_mesh, replicate
from jddp.engine.state import Replicated
from jddp.errors import ConfigError, DataError, FileSystemError

Arrays = dict[str, np.ndarray]


class _Safetensors:
    """Arrays by their paths; the text is the format's metadata."""

    @staticmethod
    def pack(arrays: Arrays, about: str) -> bytes:
        try:
            return safetensors.numpy.save(arrays, metadata={ABOUT: about})
        except safetensors.SafetensorError as error:
            raise ConfigError(f"safetensors: {error}. Let the file end in .msgpack.") from error

    @staticmethod
    def unpack(packed: bytes) -> tuple[Arrays, dict[str, Any]]:
        size = int.from_bytes(packed[:8], "little")
        about = json.loads(json.loads(packed[8 : 8 + size])["__metadata__"][ABOUT])
        arrays = {
            name: np.frombuffer(x["data"], about["dtypes"][name]).reshape(x["shape"])
            for name, x in safetensors.deserialize(packed)
        }
        return arrays, about


class _Msgpack:
    """A tree of dicts, as `flax.serialization` reads it; the text stands beside its fields."""

    @staticmethod
    def pack(arrays: Arrays, about: str) -> bytes:
        return serialization.msgpack_serialize({**nested(arrays), ABOUT: about})

    @staticmethod
    def unpack(packed: bytes) -> tuple[Arrays, dict[str, Any]]:
        tree = serialization.msgpack_restore(packed)
        about = json.loads(tree.pop(ABOUT))
        return by_path(tree), about


ABOUT = "jddp"
FORMS = {".safetensors": _Safetensors, ".msgpack": _Msgpack}


def export(folder: Path, file: Path, fields: Sequence[str] | None = None) -> None:
    """Writes fields of a checkpoint's state into one file.

    Args:
      folder: Of the checkpoint.
      file: Made anew; its suffix says the format.
      fields: Of the state, as they are evaluated; None for all, as they are.

    Raises:
      ConfigError: If the suffix is unknown, or the format has no such numbers.
      FileSystemError: If the checkpoint cannot be read, or the file cannot be written.
    """
    form = _form_of(file)
    leaves = by_path(read(folder) if fields is None else read_values(folder, fields))
    lie = dict.fromkeys(leaves, Replicated()) if fields else layouts_in(read_described(folder))
    keys = {name: str(jax.random.key_impl(x)) for name, x in leaves.items() if _is_key(x)}
    arrays = {
        name: np.asarray(jax.random.key_data(x) if name in keys else x)
        for name, x in leaves.items()
    }
    about = {
        "step": int(folder.name),
        "dtypes": {name: x.dtype.name for name, x in arrays.items()},
        "keys": keys,
        "layouts": lie,
        "run": read_object(folder / "run.json"),
    }
    try:
        with file.open("xb") as opened:
            opened.write(form.pack(arrays, json.dumps(about, default=in_file)))
    except OSError as error:
        raise FileSystemError(f"{file} cannot be written: {error.strerror}.") from error


def import_file(file: Path, directory: Path) -> int:
    """Makes a checkpoint of what `export` wrote; returns its step.

    Args:
      file: With a suffix that says its format.
      directory: Of checkpoints; one of the same step is replaced.

    Raises:
      ConfigError: If the suffix is unknown.
      DataError: If the file holds something else.
      FileSystemError: If it cannot be read, or the checkpoint cannot be written.
    """
    form = _form_of(file)
    try:
        arrays, about = form.unpack(file.read_bytes())
        step, run, keys = int(about["step"]), about["run"], about["keys"]
        words = about.get("layouts", {})  # none of what lay in a checkpoint of format 1
        layouts = {name: layout_of(words.get(name), x.shape) for name, x in arrays.items()}
    except OSError as error:
        raise FileSystemError(f"{file} cannot be read: {error.strerror}.") from error
    except Exception as error:  # of a parser that is given anything
        raise DataError(f"{file} is no export of a checkpoint: {error!r}.") from error
    leaves = {
        name: jax.random.wrap_key_data(x, impl=keys[name]) if name in keys else x
        for name, x in arrays.items()
    }
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    writer = Writer(directory.absolute(), Keep(2**62))
    writer.start(step, replicate(leaves, make_mesh(1)), run, layouts)
    writer.close()
    if writer.failure is not None:
        raise writer.failure
    return step


def _form_of(file: Path) -> Any:
    if file.suffix not in FORMS:
        raise ConfigError(f"{file} says no format. Let it end in {' or '.join(FORMS)}.")
    return FORMS[file.suffix]


def _is_key(x: Any) -> bool:
    return bool(jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key))
