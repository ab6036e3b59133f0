"""Checkpoints: the complete state of a run for resumption, with digests that prove it unchanged.

    checkpoints = CheckpointFolder(directory, keep=3)
    checkpoints.save(step, state, {"position": 10})
    found = checkpoints.restore(like=state)  # the newest with valid digests, or None
    checkpoints.close()                      # waits for what is still being written

A checkpoint is a folder with the step as its name:

    state/          the arrays, written by orbax
    arrays.json     shape, dtype, digest and layout of each: see `arrays`
    run.json        run data: step, position in the data, metrics, config, versions
    SHA256SUMS      digests of all other files, for `sha256sum --check` too

Every process calls `save` and `restore`. Arrays that are split over the processes are written by
their owners, everything else by process 0. A checkpoint gets its name when all of it has been read
back and is on the disk. A checkpoint with a wrong digest is renamed, never removed, and the one
before it is used.
"""

import contextlib
import functools
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from jddp.checkpoint import folders
from jddp.checkpoint.arrays import Layouts, check_names, difference, find_altered, layouts_in
from jddp.checkpoint.checksums import NAME as SUMS
from jddp.checkpoint.reader import find_newest, read_described, read_object
from jddp.checkpoint.resize import empty, on_this_mesh, to_read
from jddp.checkpoint.storage import LocalFolder, Storage
from jddp.checkpoint.writer import SECONDS, Writer
from jddp.distributed.coordination import from_first
from jddp.engine.moving_average import UNAVERAGED
from jddp.engine.state import Replicated, TrainState, by_path
from jddp.errors import ConfigError, FileSystemError
from jddp.files import make_folder
from jddp.typing import JsonObject, PyTree, Settings

log = logging.getLogger("jddp")

SEEN_SECONDS = 60.0  # in which a shared file system shows a new file to all hosts


class Restored(NamedTuple):
    """The contents of a checkpoint.

    Attributes:
      step: Number of finished optimizer steps.
      state: The training state, on the devices.
      beside: The run data.
    """

    step: int
    state: TrainState
    beside: JsonObject


class CheckpointFolder:
    """The numbered checkpoints in one directory.

    Args:
      directory: Directory of the checkpoints; made if it is missing.
      keep: Number of the newest checkpoints that stay.
      keep_every: Interval in steps; checkpoints at its multiples stay too.
      storage: Storage of the run, whose folder contains `directory`; by default the folder above.
      is_written: Whether `save` will be called: the directory is made, and unfinished files of an
        ended process are removed. Another process may be writing there otherwise.

    Raises:
      FileSystemError: If the directory cannot be made or written.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        keep_every: int | None = None,
        storage: Storage | None = None,
        is_written: bool = True,
    ) -> None:
        self._directory = Path(directory).absolute()
        try:
            if is_written:
                make_folder(self._directory, mode=0o700)
            surplus = functools.partial(folders.surplus, keep=keep, keep_every=keep_every)
            storage = storage or LocalFolder(self._directory.parent)
            self._writer = Writer(self._directory, surplus, storage)
            if is_written and jax.process_index() == 0:
                if reason := folders.remove_unfinished(self._directory):
                    log.warning("%s: leftovers cannot be removed: %s.", self._directory, reason)
                (self._directory / "0.new").mkdir()  # finds now whether it can be written
                (self._directory / "0.new").rmdir()
            if is_written:
                # Else process 0 could mistake the first files of a faster process for leftovers.
                from_first("opened", self._directory.name, timeout_seconds=SECONDS)
        except OSError as error:
            raise self._cannot("be opened for checkpoints", error) from error

    def steps(self) -> list[int]:
        """The steps of all checkpoints, damaged ones included, in order.

        Raises:
          FileSystemError: If the directory cannot be read.
        """
        return folders.finished(self._directory)

    def save(self, step: int, state: TrainState, beside: Settings, layouts: PyTree = None) -> None:
        """Copies the state off the devices, and writes it in the background.

        An error of the file system is logged, and loses only this checkpoint: earlier ones stay,
        and the next one is tried. `close` raises the error if the last one failed.

        Args:
          step: Number of finished optimizer steps; a checkpoint of the same step is replaced.
          state: The training state.
          beside: The run data, as JSON.
          layouts: Layouts of its leaves; None if all are replicated.
        """
        check_names(state)
        self._writer.start(step, by_path(state), beside, _layouts_of(state, layouts))

    def keep(self, num: int) -> None:
        """Sets the number of the newest checkpoints that stay from now on."""
        self._writer.surplus = functools.partial(folders.surplus, keep=num)

    def keep_only(self, steps: Sequence[int]) -> None:
        """Sets the checkpoints that stay from now on, beside the one that was saved last."""
        self._writer.surplus = functools.partial(folders.surplus_but, steps)

    def restore(self, like: TrainState, layouts: TrainState | None = None) -> Restored | None:
        """Reads the newest checkpoint with valid digests onto the devices; None if there is none.

        Args:
          like: State with the structure, shapes and shardings to restore to; not changed.
          layouts: Layouts of its leaves; None if all are replicated. The checkpoint may be from
            another number of replicas, and its optimizer sharded or not: see `resize`.

        Raises:
          ConfigError: If the checkpoint is from another model or optimizer than `like`, or the path
            of an array in `like` leads out of its folder, or is not printable.
          FileSystemError: If there are checkpoints, but none is valid and readable.
        """
        check_names(like)
        self._writer.wait()
        there = self.steps()
        while (step := self._newest_sound()) is not None:
            if (restored := self._read(step, like, layouts)) is not None:
                return restored
        if there:
            raise FileSystemError(
                f"{self._directory} holds checkpoints, but all are damaged: they are now named "
                "*.damaged. Restore an undamaged copy, or choose another directory to start from "
                "step 0."
            )
        return None

    def _newest_sound(self) -> int | None:
        """The newest step with undamaged files; damaged checkpoints are renamed."""
        found = None
        if jax.process_index() == 0:
            found = find_newest(self._directory, self._set_aside)
        shared = from_first("newest", json.dumps(found), timeout_seconds=SECONDS)
        step: int | None = json.loads(shared)
        if step is not None:
            wait_until_seen(self._directory / str(step) / SUMS)
        return step

    def _set_aside(self, step: int, damage: str) -> None:
        if jax.process_index() != 0:
            return
        try:
            aside = folders.set_aside(self._directory, step)
        except OSError as error:
            raise self._cannot(f"have its damaged step {step} renamed", error) from error
        log.error(
            "The checkpoint of step %d is damaged: %s. It is kept as %s.", step, damage, aside
        )

    def _read(self, step: int, like: TrainState, layouts: TrainState | None) -> Restored | None:
        """Reads a checkpoint; None if it was removed, or renamed because an array has changed."""
        folder = self._directory / str(step)
        whole, here = by_path(like), _layouts_of(like, layouts)
        try:
            described = read_described(folder)
            # An earlier version averaged parameters alone.
            wanted = {
                n: x for n, x in whole.items() if n in described or not n.startswith("ema_state/")
            }
            beside = read_object(folder / "run.json")
            there = layouts_in(described)
            if differ := difference(described, wanted, there, here):
                raise ConfigError(
                    f"{self._directory}: step {step} is from another model, optimizer or mesh. "
                    f"Choose another directory, or resume with the job that saved it:\n{differ}"
                )
            target = {n: to_read(described[n]["shape"], there[n], x) for n, x in wanted.items()}
            with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
                given = ocp.args.StandardRestore({n: x for n, x in target.items() if x.size})
                arrays = empty(target) | handler.restore(epath.Path(folder / "state"), args=given)
        except ConfigError:
            raise
        except Exception as error:  # orbax raises anything for foreign files
            if jax.process_count() == 1 and not folder.exists():
                return None  # A run that trains there has removed it, and named a newer one.
            if isinstance(error, FileSystemError):
                raise
            raise self._cannot(f"be read at step {step}", error) from error
        if damage := find_altered(arrays, described):
            self._set_aside(step, damage)
            return None
        del beside["step"]
        found = {n: on_this_mesh(arrays[n], x, there[n]) for n, x in wanted.items()}
        if begun := whole.keys() - found.keys():
            log.warning(UNAVERAGED, "begin it")
            raw = {n: found[n.replace("ema", "model", 1)] for n in begun}
            found |= {n: jax.numpy.array(x, whole[n].dtype) for n, x in raw.items()}
        state = jax.tree.unflatten(jax.tree.structure(like), [found[n] for n in whole])
        return Restored(step, state, beside)

    def wait(self) -> None:
        """Waits until the last checkpoint is written.

        Raises:
          FileSystemError: If it could not be written.
        """
        if (failure := self._writer.wait()) is not None:
            raise failure

    def close(self) -> None:
        """Waits as `wait` does, and frees the writer's resources."""
        self._writer.close()
        self.wait()

    def _cannot(self, done: str, error: BaseException) -> FileSystemError:
        """An error of orbax, TensorStore or the file system, in one line."""
        return FileSystemError(f"{self._directory} cannot {done}: {folders.first_line(error)}")


def _layouts_of(state: TrainState, layouts: TrainState | None) -> Layouts:
    """Layouts by path."""
    return by_path(jax.tree.map(lambda _: Replicated(), state) if layouts is None else layouts)


def wait_until_seen(path: Path, text: str = "") -> None:
    """Waits until a file that process 0 has written is there and contains this text.

    Raises:
      FileSystemError: If the file does not appear.
    """
    until = time.monotonic() + SEEN_SECONDS
    while not (path.exists() and text in path.read_text()):
        if time.monotonic() > until:
            raise FileSystemError(
                f"Process {jax.process_index()} does not see {path}, which process 0 has written. "
                "All processes need the same directory, on a shared file system."
            )
        time.sleep(0.1)
