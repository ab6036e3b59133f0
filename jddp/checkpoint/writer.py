"""Write one checkpoint in the background, on all processes together.

    copy off the devices ─► write ─► all have written? ─► seal ─► name ─► remove what is surplus
    (the loop waits)        (each its own)                (process 0)

If any process cannot write its part, none of it becomes a checkpoint, all learn why, and what was
saved before stays.
"""

import asyncio
import concurrent.futures
import json
import logging
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jddp.checkpoint import steps
from jddp.checkpoint.arrays import describe
from jddp.checkpoint.sums import seal
from jddp.coordination import from_first, gather
from jddp.digest import digests, find_divergence
from jddp.errors import DivergenceError, FileSystemError

PyTree = Any
log = logging.getLogger("jddp")

SECONDS = 1800.0  # that a process may take to write its part
FILE_BYTES = 2**26  # of a file of arrays, about: several are digested at the same time


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: the newest `newest`, and multiples of `every` steps."""

    newest: int
    every: int | None = None


class Writer:
    """Writes checkpoints one after the other.

    Args:
      directory: Where; it is there.
      keep: What is to stay.

    Attributes:
      failure: Why the last checkpoint could not be written; None if it could.
    """

    def __init__(self, directory: Path, keep: Keep) -> None:
        self.failure: FileSystemError | None = None
        self._directory, self._keep = directory, keep
        self._handler = ocp.PyTreeCheckpointHandler()
        self._thread: threading.Thread | None = None
        self._bug: BaseException | None = None

    def start(self, step: int, arrays: Mapping[str, jax.Array], beside: Mapping[str, Any]) -> None:
        """Waits for the checkpoint before, and for the copy off the devices; no longer.

        Args:
          step: Finished optimizer steps.
          arrays: By their paths, on the devices; they may be given away afterwards.
          beside: What goes beside them, as JSON.
        """
        self.wait()
        shapes = jax.tree.map(_shape, arrays)
        text, found = json.dumps(beside) + "\n", digests(arrays)
        failure: Exception | None = None
        parts: list[Any] = []
        try:
            folder = self._folder(step) / "state"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            parts = self._copy(folder, arrays)
        except (OSError, ValueError) as error:
            failure = error

        def finish() -> None:
            try:
                reason = first_line(_wait_for(parts, failure))
                self.failure = self._finish(step, reason, shapes, found, text)
            except BaseException as error:  # which `wait` raises, where somebody can see it
                self._bug = error

        self._thread = threading.Thread(target=finish, name=f"jddp-save-{step}")
        self._thread.start()

    def wait(self) -> None:
        """Waits until what was started is a checkpoint, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._bug is not None:
            bug, self._bug = self._bug, None
            raise bug

    def close(self) -> None:
        """Waits, and lets go of what writing needs."""
        self.wait()
        self._handler.close()

    def _folder(self, step: int) -> Path:
        return self._directory / f"{step}.new"

    def _copy(self, folder: Path, arrays: PyTree) -> list[Any]:
        """Copies arrays to the host, and returns the writing that has begun."""
        arguments = ocp.args.PyTreeSave(arrays, ocdbt_target_data_file_size=FILE_BYTES)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # A notebook runs a loop of its own.
            begun = pool.submit(
                lambda: asyncio.run(self._handler.async_save(epath.Path(folder), args=arguments))
            )
            return begun.result() or []

    def _finish(
        self, step: int, reason: str, shapes: PyTree, found: jax.Array, beside: str
    ) -> FileSystemError | None:
        """Makes a checkpoint of what all have written; returns why, if it cannot be.

        Raises:
          DivergenceError: If replicas differ, which all processes see alike.
        """
        rows = np.asarray(found)
        told = find_divergence(rows, shapes)
        if told is not None:
            raise DivergenceError(f"Step {step} is not saved: {told}.")
        votes = gather(f"save/{step}", reason, timeout_seconds=SECONDS)
        reason = next((f"process {i}: {vote}" for i, vote in enumerate(votes) if vote), "")
        if jax.process_index() == 0:
            try:
                if not reason:
                    self._commit(step, describe(shapes, rows), beside)
            except (OSError, ValueError) as error:
                reason = first_line(error)
            if reason:
                shutil.rmtree(self._folder(step), ignore_errors=True)
        reason = from_first(f"saved/{step}", reason, timeout_seconds=SECONDS)
        if not reason:
            return None
        failure = FileSystemError(
            f"{self._directory}: step {step} cannot be saved: {reason}. What was saved before is "
            "still there."
        )
        log.error("%s", failure)
        return failure

    def _commit(self, step: int, described: Mapping[str, Any], beside: str) -> None:
        folder = self._folder(step)
        self._handler.finalize(epath.Path(folder / "state"))
        (folder / "arrays.json").write_text(json.dumps(described, indent=1) + "\n")
        (folder / "run.json").write_text(beside)
        seal(folder)
        steps.commit(self._directory, step)
        there = steps.finished(self._directory)
        for old in steps.surplus(there, keep=self._keep.newest, keep_every=self._keep.every):
            steps.remove(self._directory, old)


def first_line(error: BaseException | None) -> str:
    """What orbax, TensorStore or the file system say, in one line; nothing for no error."""
    if error is None:
        return ""
    return next(iter(str(error).strip().splitlines()), repr(error))


def _wait_for(parts: list[Any], failure: Exception | None) -> Exception | None:
    """Waits until all parts are written; returns what the first failed with."""
    for part in parts:
        try:
            part.result()
        except (OSError, ValueError) as error:
            failure = failure or error
    return failure


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
