"""Weights to start from: a file or folder becomes a tree, and a tree is fitted to a model.

    tree = read_weights(Path("weights.safetensors"))
    params, told = fit_weights(tree, model_params, partial=True)

Taken are safetensors, Flax's msgpack, the checkpoints of a run of jddp's, and any other folder that
orbax has written. All of them hold numbers and names, and no code.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import safetensors.flax
from etils import epath
from flax import serialization

from jddp.checkpoint.arrays import by_path, nested
from jddp.checkpoint.listing import directory_of
from jddp.checkpoint.reader import read_newest
from jddp.checkpoint.writer import first_line
from jddp.errors import ConfigError, DataError, FileSystemError
from jddp.typing import PyTree


def read_weights(path: Path) -> PyTree:
    """The arrays in a file or folder, as nested dicts by the parts of their names.

    Names are taken apart at "/", or where there is none at ".". Of a run it is the parameters and
    the model's other state, in its newest checkpoint whose digests hold.

    Raises:
      ConfigError: If the path is of no kind that is known.
      DataError: If it is damaged, or something else.
      FileSystemError: If it cannot be read.
    """
    if not path.exists():
        raise FileSystemError(f"{path} is not there.")
    if path.is_dir() and not (path / "_METADATA").exists():
        return read_newest(directory_of(path), ["params", "model_state"])
    readers = {".safetensors": _read_safetensors, ".msgpack": _read_msgpack}
    read = _read_orbax if path.is_dir() else readers.get(path.suffix)
    if read is None:
        raise ConfigError(
            f"{path} says no format. Weights are read from .safetensors, .msgpack, a run "
            "directory, or a folder that orbax has written."
        )
    try:
        return read(path)
    except OSError as error:
        raise FileSystemError(f"{path} cannot be read: {first_line(error)}") from error
    except Exception as error:  # of a parser that is given anything
        raise DataError(f"{path} holds no weights: {first_line(error)}") from error


def _read_safetensors(path: Path) -> PyTree:
    arrays = safetensors.flax.load_file(path)
    mark = "/" if any("/" in name for name in arrays) else "."
    return nested({name.replace(mark, "/"): np.asarray(x) for name, x in arrays.items()})


def _read_msgpack(path: Path) -> PyTree:
    tree = serialization.msgpack_restore(path.read_bytes())
    # `export` has put a text of its own beside the arrays.
    return nested({name: x for name, x in by_path(tree).items() if hasattr(x, "dtype")})


def _read_orbax(path: Path) -> PyTree:
    handler = ocp.PyTreeCheckpointHandler()
    try:
        folder = epath.Path(path.absolute())
        names = handler.metadata(folder).tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
        return handler.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    finally:
        handler.close()


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What became of given weights, by path.

    Attributes:
      taken: Those that the model now has.
      made: What the model has and was not given, with the shapes where they differ.
      unused: What was given and the model does not have.
    """

    taken: tuple[str, ...]
    made: tuple[str, ...]
    unused: tuple[str, ...]

    def __add__(self, other: "Loaded") -> "Loaded":
        """Of two trees together."""
        return Loaded(self.taken + other.taken, self.made + other.made, self.unused + other.unused)

    def __str__(self) -> str:
        """In a sentence or three."""
        told = f"{len(self.taken)} of {len(self.taken) + len(self.made)} arrays are as given."
        told += f" Made anew: {', '.join(self.made)}." * bool(self.made)
        return told + f" Not used: {', '.join(self.unused)}." * bool(self.unused)


def fit_weights(given: PyTree, wanted: PyTree, *, partial: bool) -> tuple[PyTree, Loaded]:
    """Gives each place of a model the array of its path.

    Args:
      given: A tree of arrays.
      wanted: What the model has; where `partial`, with values.
      partial: Whether the model keeps its own where it is given none, or one of another shape.

    Returns:
      A tree of the structure of `wanted`, and what became of what was given.

    Raises:
      ConfigError: If the two differ in a path or shape, and it is not `partial`.
    """
    found, own = by_path(given), by_path(wanted)
    shapes = {name: np.shape(x) for name, x in found.items()}
    taken = [name for name, x in own.items() if shapes.get(name) == np.shape(x)]
    unused = [name for name in found if name not in own]
    differ = sorted({*own, *unused} - set(taken))
    if differ and not partial:
        name = differ[0]
        has = np.shape(own[name]) if name in own else "nothing"
        raise ConfigError(
            f"params= does not fit the model at {len(differ)} places; the first is {name!r}: got "
            f"{shapes.get(name, 'nothing')}, the model has {has}. With partial=True the model "
            "keeps its own there."
        )
    values = [found[name] if name in taken else x for name, x in own.items()]
    made = [
        f"{name} ({shapes[name]} given, {np.shape(own[name])} here)" if name in shapes else name
        for name in own
        if name not in taken
    ]
    told = Loaded(tuple(taken), tuple(made), tuple(unused))
    return jax.tree.unflatten(jax.tree.structure(wanted), values), told
