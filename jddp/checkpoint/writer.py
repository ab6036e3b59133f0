"""Writes checkpoints in the background, on all processes together.

    copy off the devices ─► write ─► all have written? ─► seal ─► name ─► remove surplus ones
    (the loop waits)        (each its part)               (process 0)

If any process cannot write its part, no checkpoint is made, all get the reason, and earlier
checkpoints stay.
"""

import asyncio
import concurrent.futures
import contextlib
import errno
import json
import logging
import os
import re
import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jddp.checkpoint import folders
from jddp.checkpoint.arrays import Described, Layouts, describe_arrays, in_file
from jddp.checkpoint.checksums import seal
from jddp.checkpoint.counters import keep_level
from jddp.checkpoint.quiet import keep_quiet
from jddp.checkpoint.storage import Storage
from jddp.distributed.coordination import computing, from_first, gather
from jddp.engine.digest import digests, find_divergence
from jddp.errors import FileSystemError, ReplicaMismatchError
from jddp.files import SameFolder, make_folder
from jddp.typing import PyTree, Settings

DeviceArrays = Mapping[str, jax.Array]
Snapshot = tuple[PyTree, jax.Array, Layouts]  # shapes of arrays, their digests and their layouts
log = logging.getLogger("jddp")

SECONDS = 1800.0  # that a process may take to write its part
LEAST_BYTES = 2**18  # approximate size of a checkpoint without its arrays
FILE_BYTES = 2**26  # approximate size of a file of arrays: several are digested at the same time


class Writer:
    """Writes checkpoints one after the other.

    Args:
      directory: Existing directory of the checkpoints.
      surplus: Function from the steps of all checkpoints, and the step just saved, to the steps to
        remove.
      storage: Storage of the run, whose folder contains the directory. Once that path leads to
        another folder, nothing is written.

    Attributes:
      surplus: The function above, which may be replaced.
    """

    def __init__(self, directory: Path, surplus: folders.Surplus, storage: Storage) -> None:
        keep_quiet()
        keep_level()
        self._directory = directory
        self.surplus = surplus
        self._storage = storage
        self._own = SameFolder(directory)
        self._storage.pinned.pin()
        with contextlib.suppress(FileNotFoundError):
            self._own.pin()
        # Each process then has a directory of its own, and process 0's is copied.
        self._is_apart = not storage.is_shared and jax.process_count() > 1
        self._handler = _handler_of_first() if self._is_apart else ocp.PyTreeCheckpointHandler()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jddp-save")
        # It stays open: after a failure TensorStore still reports later writes to it.
        self._loop = asyncio.new_event_loop()
        weakref.finalize(self, self._loop.close)
        self._last: concurrent.futures.Future[FileSystemError | None] | None = None
        # The kinds of the last failures to save and to remove, empty after a success.
        self._reported = self._unremoved = ""

    def start(self, step: int, arrays: DeviceArrays, beside: Settings, layouts: Layouts) -> None:
        """Waits for the previous checkpoint and the copy off the devices, but not for writing.

        Args:
          step: Number of finished optimizer steps.
          arrays: Arrays by their paths, on the devices; they may be donated afterwards.
          beside: The run data, as JSON.
          layouts: Layouts by path.
        """
        self.wait()
        text = json.dumps({**beside, "step": step}, default=_number_or_text) + "\n"
        reason = ""
        parts = []
        saved = jax.tree.map(_shape, arrays), digests(arrays), layouts
        if self._is_apart:
            arrays = _replicated(arrays)
        try:
            self._check_place()
            self._directory.mkdir(mode=0o700, exist_ok=True)
            folder = self._folder(step) / "state"
            make_folder(folder, mode=0o700)
            _refuse_full(folder, arrays)
            if not self._is_apart or jax.process_index() == 0:
                parts = self._copy(folder, arrays)
        except (OSError, ValueError) as error:
            reason = folders.first_line(error)
        self._last = self._thread.submit(self._finish, step, parts, reason, saved, text)

    def wait(self) -> FileSystemError | None:
        """Waits until the last checkpoint is written; returns the error if it is not."""
        return None if self._last is None else self._last.result()

    def close(self) -> None:
        """Waits, and frees the thread and orbax's resources."""
        self._thread.shutdown()
        self._handler.close()

    def _check_place(self) -> None:
        """Raises an OSError if the directory belongs to another run, or was moved.

        A directory that was removed is made again, but a link in its place is not followed.
        """
        self._storage.pinned.check()
        if self._directory.is_symlink():
            self._own.check()

    def _folder(self, step: int) -> Path:
        return self._directory / f"{step}.new"

    def _copy(self, folder: Path, arrays: DeviceArrays) -> list[Any]:
        """Copies arrays to the host, and returns the futures of writing them."""
        written = {name: x for name, x in arrays.items() if x.size}  # Orbax refuses empty ones.
        arguments = ocp.args.PyTreeSave(written, ocdbt_target_data_file_size=FILE_BYTES)

        def begin() -> list[Any]:
            save = self._handler.async_save(epath.Path(folder), args=arguments)
            return self._loop.run_until_complete(save) or []

        # In a thread: a notebook runs a loop of its own in this one.
        return self._thread.submit(begin).result()

    def _finish(
        self, step: int, parts: list[Any], reason: str, saved: Snapshot, beside: str
    ) -> FileSystemError | None:
        """Completes a checkpoint when its parts are written; returns the error if it cannot.

        Args:
          step: Number of finished optimizer steps.
          parts: Futures of writing the arrays of this process.
          reason: Reason why this process cannot write them; empty if it can.
          saved: Description of the arrays.
          beside: Text of the run data.

        Raises:
          ReplicaMismatchError: On all processes, if replicas differ.
        """
        for part in parts:
            try:
                part.result()
            except (OSError, ValueError) as error:
                reason = reason or folders.first_line(error)
        shapes, found, layouts = saved
        if (divergence := find_divergence(found, shapes)) is not None:
            raise ReplicaMismatchError(f"Step {step} is not saved: {divergence}.")
        votes = gather(f"save/{self._directory.name}/{step}", reason, timeout_seconds=SECONDS)
        reason = next((f"process {i}: {vote}" for i, vote in enumerate(votes) if vote), "")
        if jax.process_index() == 0:
            try:
                if not reason:
                    self._commit(step, describe_arrays(shapes, found, layouts), beside)
                    self.remove(step, self.surplus)
            except (OSError, ValueError, FileSystemError) as error:
                reason = f"process 0: {folders.first_line(error)}"
        if self._is_apart or (reason and jax.process_index() == 0):
            shutil.rmtree(self._folder(step), ignore_errors=True)
        reason = from_first(f"saved/{self._directory.name}/{step}", reason, timeout_seconds=SECONDS)
        is_new = _kind(reason) != self._reported
        self._reported = _kind(reason)
        if not reason:
            return None
        failure = FileSystemError(
            f"{self._directory}: step {step} cannot be saved: {reason}. Earlier checkpoints stay."
        )
        log.log(logging.ERROR if is_new else logging.DEBUG, "%s", failure)
        return failure

    def _commit(self, step: int, described: Described, beside: str) -> None:
        folder = self._folder(step)
        self._handler.finalize(epath.Path(folder / "state"))
        (folder / "arrays.json").write_text(json.dumps(described, indent=1, default=in_file) + "\n")
        (folder / "run.json").write_text(beside)
        seal(folder)
        self._check_place()
        folders.commit(self._directory, step)
        self._storage.publish(self._directory / str(step))

    def remove(self, step: int, surplus: folders.Surplus) -> None:
        """Removes checkpoints that are no longer kept, on process 0; logs those that stay.

        Args:
          step: Step of the newest checkpoint, which stays.
          surplus: Function from the steps of all checkpoints, and this one, to those to remove.
        """
        try:
            self._check_place()
            old = surplus(folders.finished(self._directory), step)
            reason = folders.remove(self._directory, old)
            self._storage.remove_surplus(self._directory.name, step, surplus)
        except (OSError, FileSystemError) as error:
            reason = folders.first_line(error)
        is_new = _kind(reason) != self._unremoved
        self._unremoved = _kind(reason)
        if reason and is_new:
            log.warning(
                "%s: step %d is saved, but another checkpoint cannot be removed: %s. The removal "
                "is tried again after each save.",
                *(self._directory, step, reason),
            )


def _kind(reason: str) -> str:
    """The kind of a failure: its error number, or its text up to the first file name."""
    numbers = re.findall(r"(?:Errno |error_code=')(\d+)", reason)
    return str((numbers or re.split("[\"'/]", reason))[0])


def _refuse_full(folder: Path, arrays: DeviceArrays) -> None:
    """Raises an error for a full disk before orbax does: its errors are longer."""
    room = os.statvfs(folder)
    # Half of the arrays' size: they may be written smaller than they are.
    least = sum(x.size * x.dtype.itemsize for x in arrays.values()) // 2 + LEAST_BYTES
    if room.f_blocks and room.f_bfree * room.f_frsize < least:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))


class _AnyNumber:
    """Accepts files of one process of several, which orbax would refuse."""

    def validate_all_array_metadatas(self, array_metadatas: object) -> None:
        """Raises nothing."""


def _handler_of_first() -> ocp.PyTreeCheckpointHandler:
    """A handler that only process 0 calls, and that writes whole arrays.

    Orbax's own handler lets processes share the writing, and wait for each other's files.
    """
    store = ocp.type_handlers.get_type_handler(jax.Array)._array_metadata_store  # of random keys
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
