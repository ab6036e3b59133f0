"""A loop of your own: its saves, in the format of `fit`, and batches that do not divide.

    saves = Saves(steps)
    found = saves.restore(directory, like=state)         # (state, extra), or None
    batch = pad_for_step(batch, steps)                   # batch["mask"] is 0 for padding
    saves.save(directory, state, {"epoch": 3}, keep=3)   # written in the background

A directory holds the checkpoints of one training: the first state is saved where there is none, or
after the newest was restored, and steps only grow. So the newest checkpoint is the one to resume
from, and no other training's is removed or replaced.
"""

import contextlib
import json
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from jddp.checkpoint.checkpoints import Checkpoints
from jddp.checkpoint.folders import finished
from jddp.checkpoint.writer import SECONDS
from jddp.config.permissions import absolute
from jddp.distributed.coordination import from_first
from jddp.engine.compiled import CompiledSteps
from jddp.engine.evaluate import pad_rows, refuse_padding
from jddp.engine.host_rows import as_arrays
from jddp.engine.mesh import from_all_processes
from jddp.engine.state import TrainState
from jddp.errors import ConfigError, FileSystemError, UsageError
from jddp.modules.rows import check_rows, count_rows
from jddp.trainer.saving import LATEST, refuse_unsound
from jddp.typing import Batch

# By directory, for all objects of this process: one waits for what another is still writing.
_written: dict[Path, Checkpoints] = {}


class Saves:
    """The checkpoints of a loop of your own.

    Args:
      steps: The compiled steps, which have the layouts of a state.
    """

    def __init__(self, steps: CompiledSteps) -> None:
        self._steps = steps
        # What was saved or restored last, by directory: step, state and extra values.
        self._last: dict[Path, tuple[int, weakref.ref[TrainState], str]] = {}

    def save(self, directory: str | Path, state: TrainState, extra: Any, keep: int) -> Checkpoints:
        """As `jddp.DataParallel.save`."""
        step, folder = int(state.step), absolute(directory)
        if keep < 1:
            raise ConfigError(f"keep is at least 1; got {keep}.")
        try:
            now = step, weakref.ref(state), json.dumps(extra)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"extra= is no JSON: {error}. Give numbers, text, dicts.") from error
        self._refuse_directory(folder, step)
        refuse_unsound(step, state)
        if folder not in _written:
            _written[folder] = Checkpoints(folder, keep=keep)
        _written[folder].keep(keep)
        if self._last.get(folder) != now:
            beside = {"extra": extra, "world": self._steps.topology}
            _written[folder].save(step, state, beside, self._steps.layouts(state))
            self._last[folder] = now
        return _written[folder]

    def _refuse_directory(self, folder: Path, step: int) -> None:
        """Refuses a directory where this state would not be the newest of its training."""
        if _is_run(folder) or _is_run(folder.parent):
            raise ConfigError(
                f"{folder} is of a run of fit, which resumes from its own checkpoints alone. Save "
                "into another directory; restore reads from this one too."
            )
        last = self._last.get(folder)
        if (last is None or step < last[0]) and (there := _newest_in(folder)) is not None:
            raise ConfigError(
                f"{folder} holds a checkpoint of step {there}, from which this state of step "
                f"{step} does not come. Call restore first, or choose another directory."
            )

    def restore(self, directory: str | Path, like: TrainState | None) -> tuple[Any, Any] | None:
        """As `jddp.DataParallel.restore`, onto the devices like `like`."""
        folder = absolute(directory)
        if like is None:
            raise UsageError("restore needs the form of a state. Call init first.")
        folder /= LATEST if _is_run(folder) else ""
        if _newest_in(folder) is None:
            return None
        with contextlib.closing(Checkpoints(folder, keep=1, is_written=False)) as checkpoints:
            found = checkpoints.restore(like, self._steps.layouts(like))
        assert found is not None  # of none that is undamaged it raises
        extra = found.beside.get("extra", found.beside)
        self._last[folder] = found.step, weakref.ref(found.state), json.dumps(extra)
        return found.state, extra


def _finish() -> None:
    """Waits until all is written; what the file system refuses has been logged."""
    for checkpoints in _written.values():
        with contextlib.suppress(FileSystemError):
            checkpoints.wait()


# Not by `atexit`, which comes too late: threads can start no others any more, as a save needs to.
threading._register_atexit(_finish)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_written.clear)  # which the parent writes, and a child awaits


def _is_run(folder: Path) -> bool:
    return os.path.exists(folder / "manifest.json")  # False where it cannot be read


def _newest_in(folder: Path) -> int | None:
    """The newest step in a directory, as process 0 sees it; None for none, or no directory."""
    if folder in _written:
        with contextlib.suppress(FileSystemError):
            _written[folder].wait()
    there = finished(folder) if os.path.isdir(folder) else []
    text = from_first("steps", json.dumps(max(there, default=None)), timeout_seconds=SECONDS)
    return json.loads(text)


def pad_for_step(batch: Batch, steps: CompiledSteps, num_rows: int | None = None) -> Batch:
    """As `jddp.DataParallel.pad`, for a loss that was traced."""
    if not isinstance(batch, dict):
        raise ConfigError(f"pad adds 'mask' to a dict of arrays; got {type(batch).__name__}.")
    batch = as_arrays(batch)
    rows, num_parts = count_rows(batch), steps.num_local_replicas * steps.spec.backward.num
    if num_rows is None:
        most = max(1, int(from_all_processes(rows, "pad").max()))
        num_rows = -(-most // num_parts) * num_parts
    check_rows(num_rows, num_parts, f"{num_parts} micro-batches of this process")
    if rows > num_rows:
        raise ConfigError(f"pad: the batch has {rows} rows, more than num_rows={num_rows}.")
    if rows < num_rows:
        refuse_padding(steps.sums, f"give batches of {num_rows} rows")
    padded, valid = pad_rows(batch, num_rows)
    mask = np.asarray(padded.get("mask", valid), np.float32)
    return {**padded, "mask": mask * np.expand_dims(valid, tuple(range(1, mask.ndim)))}
