"""Initial weights: reads a tree from a file or folder, and fits it to a model.

    tree = read_weights(Path("weights.safetensors"))
    params, loaded = fit_weights(tree, model_params, partial=True)

It accepts safetensors, state dicts of PyTorch, a folder of the Hugging Face Hub,
the checkpoints of a run, and any other folder that orbax has written. Only numbers and names are
read of them, and no code.
"""

import contextlib
import dataclasses
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax.traverse_util import unflatten_dict

from jddp.checkpoint.folders import directory_of, first_line
from jddp.checkpoint.formats import SUFFIXES, HostArrays, is_hub_folder, read_file, read_hub_folder
from jddp.checkpoint.quiet import keep_quiet
from jddp.checkpoint.reader import read_newest
from jddp.engine.state import by_path
from jddp.errors import ConfigError, DataError, FileSystemError
from jddp.typing import PyTree


def read_weights(path: Path) -> PyTree:
    """The arrays in a file or folder, as nested dicts by the parts of their names.

    Names are split at "/", or at "." if no name has a "/". From a run it reads the parameters and
    the model's other state, in the newest checkpoint with valid digests.

    Raises:
      ConfigError: If the format is unknown.
      DataError: If the file is damaged, or holds something else.
      FileSystemError: If it cannot be read.
    """
    if not path.exists():
        raise FileSystemError(f"{path} does not exist.")
    if is_run_folder(path):
        return read_newest(directory_of(path), ["params", "model_state"])
    if not (path.is_dir() or path.suffix in SUFFIXES):
        raise ConfigError(
            f"{path}: unknown format. Weights are read from {', '.join(SUFFIXES)}, a run "
            "directory, a folder of the Hugging Face Hub, or one that orbax has written."
        )
    try:
        return _read_foreign(path)
    except ConfigError:
        raise
    except OSError as error:
        raise FileSystemError(f"{path} cannot be read: {first_line(error)}") from error
    except Exception as error:  # parsers raise anything for foreign files
        raise DataError(f"{path} holds no weights: {first_line(error)}") from error


def is_run_folder(path: Path) -> bool:
    """Whether it can only be a run directory, or a folder of checkpoints."""
    return path.is_dir() and not (is_hub_folder(path) or (path / "_METADATA").exists())


def _read_foreign(path: Path) -> PyTree:
    if path.is_file():
        return _as_tree(read_file(path))
    return _as_tree(read_hub_folder(path)) if is_hub_folder(path) else _read_orbax(path)


def _as_tree(arrays: HostArrays) -> PyTree:
    separator = "/" if any("/" in name for name in arrays) else "."
    found = {name: x for name, x in arrays.items() if hasattr(x, "dtype")}
    return unflatten_dict(found, sep=separator)


def _read_orbax(path: Path) -> PyTree:
    keep_quiet()
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        folder = epath.Path(path.absolute())
        names = handler.metadata(folder).tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
        return handler.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy))


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The weights that a model took from a file or tree, by path.

    Attributes:
      taken: Weights that the model took.
      made: Weights of the model that were not given, or given in another shape.
      unused: Given weights that the model does not have.
    """

    taken: tuple[str, ...]
    made: tuple[str, ...]
    unused: tuple[str, ...]

    def __add__(self, other: "Loaded") -> "Loaded":
        """The weights of both trees."""
        return Loaded(self.taken + other.taken, self.made + other.made, self.unused + other.unused)

    def __str__(self) -> str:
        """One to three sentences."""
        text = f"{len(self.taken)} of {len(self.taken) + len(self.made)} arrays were loaded."
        if self.made:
            text += f" Initialized: {', '.join(self.made)}."
        if self.unused:
            text += f" Not used: {', '.join(self.unused)}."
        return text


class Misfit(ConfigError):
    """Weights that do not fit a model.

    Args:
      where: Number of places where they differ, and the first of them.
    """

    def __init__(self, where: str) -> None:
        super().__init__(
            f"params= does not fit the model at {where}. With partial=True the model keeps its own "
            "there."
        )
        self.where = where


def fit_weights(given: PyTree, wanted: PyTree, *, partial: bool) -> tuple[PyTree, Loaded]:
    """Replaces each leaf of a model by the given array at the same path.

    Args:
      given: Tree of arrays.
      wanted: Tree of the model; with values if `partial`.
      partial: Whether the model keeps its own leaf if none is given, or one of another shape.

    Returns:
      A tree of the structure of `wanted`, and the use of the given weights.

    Raises:
      Misfit: If the two differ in a path or shape, and it is not `partial`.
    """
    found, own = by_path(given), by_path(wanted)
    there, here = ({name: np.shape(x) for name, x in tree.items()} for tree in (found, own))
    taken = [name for name, shape in here.items() if there.get(name) == shape]
    unused = [name for name in found if name not in own]
    missing = [name for name in own if name not in taken]
    if (differ := sorted({*missing, *unused})) and not partial:
        name = differ[0]
        raise Misfit(
            f"{len(differ)} places; the first is {name!r}: got {there.get(name, 'nothing')}, the "
            f"model has {here.get(name, 'nothing')}"
        )
    values = [found[name] if name in taken else x for name, x in own.items()]
    made = [f"{n} ({there[n]} given, {here[n]} here)" if n in there else n for n in missing]
    loaded = Loaded(tuple(taken), tuple(made), tuple(unused))
    return jax.tree.unflatten(jax.tree.structure(wanted), values), loaded
