"""Checkpoints: everything that a run needs to go on, written by orbax in the background.

    checkpoints = Checkpoints(directory, keep=3)
    checkpoints.save(step, state, {"data": {"position": 10}})
    state, extra = checkpoints.restore(step, like=state)
    checkpoints.close()                      # waits for what is still being written

Every process calls `save` and `restore`: orbax meets the others inside. A replicated array is
written once. The step loop waits only for the copy off the devices.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jddp.errors import ConfigError, FileSystemError
from jddp.state import TrainState

PyTree = Any


class Checkpoints:
    """The numbered checkpoints in one directory.

    Args:
      directory: Made if it is not there.
      keep: How many of the newest stay.

    Raises:
      FileSystemError: If the directory cannot be made.
    """

    def __init__(self, directory: Path, *, keep: int) -> None:
        self._directory = Path(directory).resolve()
        with self._explained("opened for checkpoints"):
            self._manager = ocp.CheckpointManager(
                self._directory,
                # Named here so that orbax can describe a checkpoint before it has read one.
                item_handlers={
                    "state": ocp.StandardCheckpointHandler(),
                    "extra": ocp.JsonCheckpointHandler(),
                },
                options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True),
            )

    def latest(self) -> int | None:
        """The newest step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, extra: dict[str, Any]) -> None:
        """Copies the state off the devices and writes it in the background.

        Args:
          step: Finished optimizer steps. A step that is there already is left as it is.
          state: The training state.
          extra: What goes beside it, as JSON.

        Raises:
          FileSystemError: If it cannot be written, or the one before it could not.
        """
        if step in self._manager.all_steps():
            return
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(_as_dict(state)), extra=ocp.args.JsonSave(extra)
        )
        with self._explained("written"):
            self._manager.save(step, args=arguments)

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Reads a checkpoint onto the devices.

        Args:
          step: Which.
          like: A state of the structure, shapes and shardings to restore to; only read.

        Raises:
          ConfigError: If the checkpoint is of another model, optimizer or mesh than `like`.
          FileSystemError: If it cannot be read.
        """
        target = jax.tree.map(_abstract, _as_dict(like))
        arguments = ocp.args.Composite(
            state=ocp.args.StandardRestore(target), extra=ocp.args.JsonRestore()
        )
        with self._explained(f"read at step {step}"):
            self._manager.wait_until_finished()
            saved = self._manager.metadata(step).item_metadata["state"]
            if saved is None:
                raise FileNotFoundError("its description, state/_METADATA, is missing")
            self._refuse_misfit(step, _forms(saved.tree), _forms(target))
            restored = self._manager.restore(step, args=arguments)
        return TrainState(**restored["state"]), restored["extra"]

    def close(self) -> None:
        """Waits until all is written.

        Raises:
          FileSystemError: If something could not be.
        """
        with self._explained("written"):
            self._manager.close()

    def _refuse_misfit(self, step: int, there: dict[str, str], here: dict[str, str]) -> None:
        names = sorted({*there, *here}, key=lambda name: (not name.startswith("params"), name))
        differ = [name for name in names if there.get(name) != here.get(name)]
        if differ:
            first = differ[0]
            raise ConfigError(
                f"{self._directory} holds, at step {step}, another model, optimizer or mesh: "
                f"{len(differ)} of {len(names)} arrays differ, such as {first!r}: "
                f"{there.get(first, 'absent')} there, {here.get(first, 'absent')} here. "
                "Choose another run.dir, or what it was saved from."
            )

    @contextlib.contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        """Turns what orbax, TensorStore and the file system raise into one line."""
        try:
            yield
        except (OSError, ValueError) as error:
            first = next(iter(str(error).strip().splitlines()), repr(error))
            raise FileSystemError(f"{self._directory} cannot be {done}: {first}") from error


def _as_dict(state: TrainState) -> dict[str, PyTree]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _forms(tree: PyTree) -> dict[str, str]:
    """Shape and dtype of every array by its path; keys as the words that are written."""

    def form(x: Any) -> str:
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.eval_shape(jax.random.key_data, x)
        return f"{tuple(x.shape)} {x.dtype}"

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): form(x)
        for path, x in leaves
        if hasattr(x, "dtype")
    }


def _is_worth_showing(record: logging.LogRecord) -> bool:
    is_error = record.levelno >= logging.ERROR
    return is_error or "orbax" not in Path(record.pathname).parts


# Orbax tells absl's log some hundred times a checkpoint what it does; a run has its own lines.
logging.getLogger("absl").addFilter(_is_worth_showing)
