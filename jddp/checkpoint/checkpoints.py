"""Checkpoints: the complete state of a run for resumption, with digests that prove it unchanged.

    checkpoints = CheckpointFolder(directory, keep=3)
    checkpoints.save(step, state, {"position": 10})
    found = checkpoints.restore(like=state)  # the newest with valid digests, or None
    checkpoints.close()                      # waits until all checkpoints are written

A checkpoint is a folder with the step as its name:

    state/          the arrays, written by orbax
    arrays.json     shape, dtype, digest and layout of each array: see `reader`
    run.json        run data: step, position in the data, metrics, config, versions
    SHA256SUMS      digests of all other files, for `sha256sum --check` too

Every process calls `save` and `restore`. Arrays that are split over the processes are written by
their owners, everything else by process 0. A checkpoint gets its name when all of it has been read
back and is on the disk. A checkpoint with a wrong digest is renamed, never removed, and the one
before it is used. Writing continues in the background, on all processes together:

    copy off the devices ─► write ─► all have written? ─► seal ─► name ─► remove surplus ones
    (the loop waits)        (each its part)               (process 0)

If any process cannot write its part, no checkpoint is made, all get the reason, and earlier
checkpoints stay.
"""

import asyncio
import concurrent.futures
import functools
import json
import logging
import shutil
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jddp.checkpoint import folders, reader
from jddp.checkpoint.folders import SUMS, seal
from jddp.checkpoint.reader import Damaged, Layouts, Restored, in_file
from jddp.checkpoint.storage import Storage
from jddp.distributed.coordination import computing, from_first, gather
from jddp.engine.digest import Found, digests, find_divergence
from jddp.engine.state import TrainState, by_path
from jddp.ground.errors import FileSystemError, ReplicaMismatchError, file_errors
from jddp.ground.files import make_folder
from jddp.ground.typing import PyTree, Settings

DeviceArrays = Mapping[str, jax.Array]
Part = Callable[[], object]  # Waits until a part of a checkpoint is written.
log = logging.getLogger("jddp")

SECONDS = 1800.0  # Limit for a process to write its part.
SEEN_SECONDS = 60.0  # Limit for a shared file system to show a new file to all hosts.
FILE_BYTES = 2**26  # Approximate size of a file of arrays: several are digested at the same time.


class Snapshot(NamedTuple):
    """The descriptions of a checkpoint's arrays, and the text of the run data."""

    step: int
    shapes: PyTree
    digests: Found
    layouts: Layouts
    beside: str


class CheckpointFolder:
    """The numbered checkpoints in one directory.

    Args:
      directory: Directory of the checkpoints; made if it is missing.
      keep: Number of the newest checkpoints that stay.
      keep_every: Interval in steps; checkpoints at its multiples stay too.
      storage: Storage of the run, whose folder contains `directory`; by default the folder above.
        Once that path leads to another folder, nothing is written.
      is_written: Whether `save` will be called: the directory is made, and unfinished files of an
        ended process are removed. If False, another process may be writing there.

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
        reader.keep_quiet()
        self._directory = Path(directory).absolute()
        self._storage = storage or Storage(self._directory.parent)
        self._surplus: folders.Surplus = functools.partial(
            folders.surplus, keep=keep, keep_every=keep_every
        )
        # Without shared storage each process has its own directory, and process 0's is copied.
        self._is_apart = not self._storage.is_shared and jax.process_count() > 1
        self._handler = _handler_of_first() if self._is_apart else ocp.PyTreeCheckpointHandler()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jddp-save")
        # The loop stays open: after a failure TensorStore still reports later writes to it.
        self._loop = asyncio.new_event_loop()
        weakref.finalize(self, self._loop.close)
        self._last: concurrent.futures.Future[FileSystemError | None] | None = None
        self._has_failed = False  # Whether the last save has failed.
        with file_errors(f"{self._directory} cannot be opened for checkpoints"):
            if is_written:
                make_folder(self._directory, mode=0o700)
            self._storage.pinned.pin()
            if is_written and jax.process_index() == 0:
                if reason := folders.remove_unfinished(self._directory):
                    log.warning("%s: leftovers cannot be removed: %s.", self._directory, reason)
                (self._directory / "0.new").mkdir()  # An unwritable directory fails here.
                (self._directory / "0.new").rmdir()
        if is_written:
            # Without this wait, process 0 could mistake the first files of a faster process for
            # leftovers.
            from_first("opened", self._directory.name, timeout_seconds=SECONDS)

    def steps(self) -> list[int]:
        """The steps of all checkpoints, damaged ones included, in order.

        Raises:
          FileSystemError: If the directory cannot be read.
        """
        return folders.finished(self._directory)

    def keep_only(self, steps: Sequence[int]) -> None:
        """Sets the checkpoints that stay from now on, besides the one that was saved last."""
        self._surplus = lambda there, saved: [x for x in there if x not in (saved, *steps)]

    def save(
        self, step: int, state: TrainState, beside: Settings, layouts: TrainState | None = None
    ) -> None:
        """Copies the state off the devices, and writes it in the background.

        An error of the file system loses only this checkpoint: earlier ones stay, and the next one
        is tried. The first one since a success is logged; `close` raises the error if the last one
        failed.

        Args:
          step: Number of finished optimizer steps; a checkpoint of the same step is replaced.
          state: The training state, which may be donated afterwards.
          beside: The run data, as JSON.
          layouts: Layouts of its leaves; None if all are replicated.
        """
        self._written()
        arrays: DeviceArrays = by_path(state)
        text = json.dumps({**beside, "step": step}, default=_number_or_text) + "\n"
        shapes = jax.tree.map(_shape, arrays)
        snapshot = Snapshot(step, shapes, digests(arrays), reader.layouts_of(state, layouts), text)
        reason, parts = "", list[Part]()
        if self._is_apart:
            arrays = _replicated(arrays)
        try:
            self._storage.pinned.check()  # A run directory that was moved is not made again.
            self._directory.mkdir(mode=0o700, exist_ok=True)
            folder = self._folder(step) / "state"
            make_folder(folder, mode=0o700)
            if not self._is_apart or jax.process_index() == 0:
                parts = self._copy(folder, arrays)
        except (OSError, ValueError) as error:
            reason = folders.first_line(error)
        self._last = self._thread.submit(self._finish, snapshot, parts, reason)

    def _folder(self, step: int) -> Path:
        return self._directory / f"{step}.new"

    def _copy(self, folder: Path, arrays: DeviceArrays) -> list[Part]:
        """Copies arrays to the host, and returns functions that wait until they are written."""
        written = {name: x for name, x in arrays.items() if x.size}  # Orbax refuses empty arrays.
        arguments = ocp.args.PyTreeSave(written, ocdbt_target_data_file_size=FILE_BYTES)

        def begin() -> list[Part]:
            save = self._handler.async_save(epath.Path(folder), args=arguments)
            return [part.result for part in self._loop.run_until_complete(save) or []]

        # It runs in another thread: a notebook runs its own event loop in this one.
        return self._thread.submit(begin).result()

    def _finish(self, saved: Snapshot, parts: list[Part], reason: str) -> FileSystemError | None:
        """Completes a checkpoint when its parts are written; returns the error if it cannot.

        Args:
          saved: The snapshot to complete.
          parts: Functions that wait until the arrays of this process are written.
          reason: Reason why this process cannot write them; empty if it can.

        Raises:
          ReplicaMismatchError: On all processes, if replicas differ.
        """
        for part in parts:
            try:
                part()
            except (OSError, ValueError, RuntimeError) as error:
                reason = reason or _why(error)
        step, name = saved.step, self._directory.name
        if (divergence := find_divergence(saved.digests, saved.shapes)) is not None:
            raise ReplicaMismatchError(f"Step {step} is not saved: {divergence}.")
        votes = gather(f"save/{name}/{step}", reason, timeout_seconds=SECONDS)
        reason = next((f"process {i}: {vote}" for i, vote in enumerate(votes) if vote), "")
        if jax.process_index() == 0:
            try:
                if not reason:
                    self._commit(saved)
                    self._remove_surplus(step)
            except (OSError, ValueError, RuntimeError, FileSystemError) as error:
                reason = f"process 0: {_why(error)}"
        if self._is_apart or (reason and jax.process_index() == 0):
            shutil.rmtree(self._folder(step), ignore_errors=True)
        reason = from_first(f"saved/{name}/{step}", reason, timeout_seconds=SECONDS)
        had_failed, self._has_failed = self._has_failed, bool(reason)
        if not reason:
            return None
        failure = FileSystemError(
            f"{self._directory}: step {step} cannot be saved: {reason}. Earlier checkpoints stay."
        )
        log.log(logging.DEBUG if had_failed else logging.ERROR, "%s", failure)
        return failure

    def _commit(self, saved: Snapshot) -> None:
        folder = self._folder(saved.step)
        self._handler.finalize(epath.Path(folder / "state"))
        described = reader.describe_arrays(saved.shapes, saved.digests, saved.layouts)
        (folder / "arrays.json").write_text(json.dumps(described, indent=1, default=in_file) + "\n")
        (folder / "run.json").write_text(saved.beside)
        seal(folder)
        self._storage.pinned.check()
        folders.commit(self._directory, saved.step)
        self._storage.publish(self._directory / str(saved.step))

    def _remove_surplus(self, step: int) -> None:
        """Removes checkpoints that are no longer kept; logs those that cannot be removed."""
        try:
            self._storage.pinned.check()
            old = self._surplus(folders.finished(self._directory), step)
            reason = folders.remove(self._directory, old)
            self._storage.remove_surplus(self._directory.name, step, self._surplus)
        except (OSError, FileSystemError) as error:
            reason = folders.first_line(error)
        if reason:
            log.warning(
                "%s: step %d is saved, but another checkpoint cannot be removed: %s. The removal "
                "is tried again after each save.",
                *(self._directory, step, reason),
            )

    def _written(self) -> FileSystemError | None:
        """Waits until the last checkpoint is written; returns the error if it is not."""
        return None if self._last is None else self._last.result()

    @property
    def is_idle(self) -> bool:
        """Whether no checkpoint is being written."""
        return self._last is None or self._last.done()

    def wait(self) -> None:
        """Waits until the last checkpoint is written.

        Raises:
          FileSystemError: If it could not be written.
        """
        if (failure := self._written()) is not None:
            raise failure

    def close(self) -> None:
        """Waits as `wait` does, and frees the thread and orbax's resources."""
        self._thread.shutdown()
        self._handler.close()
        self.wait()

    def restore(
        self, like: TrainState, layouts: TrainState | None = None, first: reader.First | None = None
    ) -> Restored | None:
        """Reads the newest checkpoint with valid digests onto the devices; None if there is none.

        Args:
          like: State, or its shapes and shardings, to restore to; not changed.
          layouts: Layouts of its leaves; None if all are replicated. The checkpoint may be from
            another number of replicas, and its optimizer sharded or not.
          first: Function that makes the first state, if `like` has shapes alone.

        Raises:
          ConfigError: If the checkpoint is from another model or optimizer than `like`.
          FileSystemError: If there are checkpoints, but none is valid and readable.
        """
        self._written()
        there = self.steps()
        while (step := self._newest_sound()) is not None:
            try:
                return reader.restore(self._directory / str(step), like, layouts, first)
            except Damaged as damage:
                self._set_aside(step, str(damage))
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
            found = reader.find_newest(self._directory, self._set_aside)
        shared = from_first("newest", json.dumps(found), timeout_seconds=SECONDS)
        step: int | None = json.loads(shared)
        if step is not None:
            wait_until_seen(self._directory / str(step) / SUMS)
        return step

    def _set_aside(self, step: int, damage: str) -> None:
        if jax.process_index() != 0:
            return
        with file_errors(f"{self._directory}: damaged step {step} cannot be renamed"):
            aside = folders.set_aside(self._directory, step)
        log.error(
            "The checkpoint of step %d is damaged: %s. It is kept as %s.", step, damage, aside
        )


def _why(error: Exception) -> str:
    """The reason of an error; saving needs threads, and a process that ends starts none."""
    reason = folders.first_line(error)
    is_cut_off = isinstance(error, RuntimeError)
    return f"call wait() before a process ends: {reason}" if is_cut_off else reason


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


class _AnyNumber:
    """Accepts the files of one process of several; orbax's own validator refuses them."""

    def validate_all_array_metadatas(self, array_metadatas: object) -> None:
        """Raises nothing."""


def _handler_of_first() -> ocp.PyTreeCheckpointHandler:
    """A handler that only process 0 calls, and that writes whole arrays.

    Orbax's own handler lets processes share the writing, and wait for each other's files.
    """
    # The store knows which arrays are random keys.
    store = ocp.type_handlers.get_type_handler(jax.Array)._array_metadata_store
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False, array_metadata_store=store)
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
        array_metadata_validator=_AnyNumber(),
    )


def _replicated(arrays: DeviceArrays) -> DeviceArrays:
    """The arrays, whole on every device."""
    sharding: Any = next(iter(arrays.values())).sharding
    everywhere = jax.NamedSharding(sharding.mesh, jax.P())
    with computing(arrays):
        replicated: DeviceArrays = jax.jit(lambda x: x, out_shardings=everywhere)(arrays)
    return replicated


def _number_or_text(x: object) -> object:
    """A number of NumPy, as an argument of `fit` may be, or another value of your settings."""
    return x.item() if isinstance(x, np.generic) else str(x)


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
