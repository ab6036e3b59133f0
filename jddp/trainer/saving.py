"""The checkpoints of a run, and `jddp.Checkpoints` for your own loop, in the same format.

    checkpoints = jddp.Checkpoints("checkpoints", keep=3)
    found = checkpoints.restore(ddp)                  # (state, extra), or None
    checkpoints.save(ddp, state, {"epoch": 3})        # written in the background
    checkpoints.wait()                                # once, after the last

A directory holds the checkpoints of one training. The first save needs a directory without
checkpoints, or a restore of the newest one, and steps only grow. So a training resumes from the
newest checkpoint, and no checkpoint of another training is removed or replaced.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jddp.checkpoint.checkpoints import SECONDS, CheckpointFolder
from jddp.checkpoint.folders import finished
from jddp.checkpoint.memory import HostMemory
from jddp.checkpoint.reader import Damaged, First, Restored, put_on_devices
from jddp.distributed.coordination import from_first
from jddp.distributed.requests import Request
from jddp.engine.compiled import Trainable
from jddp.engine.state import TrainState, is_float
from jddp.ground.errors import ConfigError, Error, FileSystemError, NumericsError, UsageError
from jddp.ground.files import absolute
from jddp.trainer.reports.files import from_plain, say, to_plain
from jddp.trainer.reports.run_directory import MEMORY, RunDirectory
from jddp.trainer.run import CONTINUOUS, Keep, Options, Progress

LATEST = "checkpoints"  # the folder to resume from; other folders hold one checkpoint
BEST = "best"  # the folder of the checkpoints that are kept for their evaluations
_LEAST_SECONDS = 1.0  # From the first step to the first state in memory, and between two.
_SHARE = 0.01  # Share of the time that states in memory may take.
log = logging.getLogger("jddp")


@jax.jit
def _is_sound(state: TrainState) -> jax.Array:
    """Whether a run can resume from a state.

    Infinities in an optimizer may be intended, such as the best loss so far; NaN never is.
    """
    finite = jax.tree.leaves((state.params, state.ema_params, state.model_state, state.ema_state))
    defined = jax.tree.leaves((state.opt_state, state.comm_state))
    checks = [jnp.isfinite(x).all() for x in finite if is_float(x)]
    checks += [~jnp.isnan(x).any() for x in defined if is_float(x)]
    return jnp.stack([jnp.bool(True), *checks]).all()


def refuse_unsound(step: int, state: TrainState) -> None:
    """Refuses a state from which a run could not resume.

    Raises:
      NumericsError: If it is not finite.
    """
    if not _is_sound(state):
        raise NumericsError(
            f"The state is not finite after step {step}, and is not saved; the last checkpoint is "
            "older. skip_nonfinite=True leaves out such steps."
        )


class Saving:
    """Saves and restores, in folders of the run directory.

    Args:
      ddp: A `jddp.DataParallel`, which has the layout of a state.
      files: The run directory, or None.
      options: Number of checkpoints to keep, and whether to resume.
    """

    def __init__(self, ddp: Trainable, files: RunDirectory | None, options: Options) -> None:
        self._ddp, self._files, self._options = ddp, files, options
        self._folders: dict[str, CheckpointFolder] = {}
        self._last: dict[str, tuple[int, str | None]] = {}  # step and reason to stop, by folder
        self._memory: HostMemory | None = None
        self._no_memory = "nothing"
        self._due_at: float | None = None  # Time of the next state in memory.
        self._requested = set[Request]()  # Requests that are not carried out yet.

    def restore(self, like: TrainState, first: First) -> Restored | None:
        """The newest state of a run, on the devices; None if there is none.

        It is in the memory of the hosts, or a checkpoint.

        Args:
          like: Shapes and shardings of a state.
          first: Function that makes the first state.

        Raises:
          ConfigError: If there must be a checkpoint and there is none, or the other way round; or
            if memory was asked for that the hosts do not have.
        """
        latest, layouts = self._folder(LATEST), self._ddp.steps.layouts(like)
        steps, path = latest.steps(), self._files and self._files.where
        newest = from_first("newest step", str(max(steps, default=-1)), timeout_seconds=SECONDS)
        self._open_memory(like)
        memory = self._memory
        kept = None if memory is None else memory.newest(above=int(newest))
        if not steps and not kept and self._options.resume == "must":
            raise ConfigError(f"resume='must', but {path} holds no checkpoint: choose its run.dir.")
        if (steps or kept) and self._options.resume == "never":
            found = f"{path} holds a run at step {kept.step if kept else steps[-1]}"
            raise ConfigError(f"{found}, and resume='never'. Choose another run.dir.")
        while memory is not None and kept is not None:
            try:
                return put_on_devices(kept, like, layouts, first)
            except Damaged as damage:
                log.error("The state of step %d in memory is damaged: %s.", kept.step, damage)
            kept = memory.newest(above=int(newest), below=kept.step)
        if (restored := latest.restore(like, layouts, first)) is not None:
            self._last[LATEST] = restored.step, restored.beside.get("stopped")
        return restored

    def has_reached(self, step: int) -> bool:
        """Whether there is a checkpoint of this step or of a later one, as this process sees it."""
        return self._files is not None and max(self._folder(LATEST).steps(), default=-1) >= step

    def _open_memory(self, like: TrainState) -> None:
        """Opens the memory of the hosts; if only the default asks for it, they may lack it."""
        every = self._options.keep.memory_every_steps
        if every == 0:
            return
        try:
            self._memory = HostMemory(self.require_directory().memory_token(), like)
        except FileSystemError as error:
            if every is not None:
                raise ConfigError(f"memory_every_steps={every}: {error} Give null, or 0.") from None
            self._no_memory = str(error)

    def report_memory(self) -> None:
        """Writes into the log of the run which memory its states take."""
        say(f"in memory for a restart: {self._memory or self._no_memory}")

    def due(self, step: int) -> Iterator[Request]:
        """The saves whose time has come; process 0 requests them for all.

        Args:
          step: Number of finished steps. The first state in memory comes a second after the first.
        """
        now, every = time.monotonic(), self._options.keep.memory_every_steps
        self._due_at = self._due_at or now + _LEAST_SECONDS
        requests = {
            Request("memory"): self._memory is not None
            and (step % every == 0 if every else now > self._due_at),
            Request("save", LATEST): self._options.save_every_steps == CONTINUOUS
            and self._folder(LATEST).is_idle
            and self._last.get(LATEST) != (step, None),
        }
        for request, is_due in requests.items():
            if is_due and request not in self._requested and jax.process_index() == 0:
                self._requested.add(request)
                yield request

    def keep_in_memory(self, state: TrainState, progress: Progress) -> None:
        """Writes a state into the memory of the hosts, unless a run could not resume from it."""
        self._requested.discard(Request("memory"))
        if self._memory is None or not _is_sound(state):
            return
        layouts = self._ddp.steps.layouts(state)
        seconds = self._memory.save(progress.step, state, progress.to_json(), layouts)
        self._due_at = time.monotonic() + max(seconds / _SHARE, _LEAST_SECONDS)

    def save(self, where: str, state: TrainState, progress: Progress) -> None:
        """Starts writing a state, unless it is the one that was saved or restored last.

        Raises:
          NumericsError: If a run could not resume from it.
        """
        self._requested.discard(Request("save", where))
        refuse_unsound(progress.step, state)
        if (now := (progress.step, progress.stopped)) != self._last.get(where):
            folder = self._folder(where)
            if where == BEST:
                folder.keep_only(progress.best)
            layouts = self._ddp.steps.layouts(state)
            folder.save(progress.step, state, progress.to_json(), layouts)
            self._last[where] = now

    def wait(self) -> None:
        """Waits until the newest checkpoint is written."""
        self._folder(LATEST).wait()

    def close(self, *, failed: bool) -> None:
        """Waits for all checkpoints; after a failure only if alone, and without errors."""
        if failed and jax.process_count() > 1:
            return  # Others may wait for this process, as it would for them.
        ignored = (Error,) if failed else ()
        for checkpoints in self._folders.values():
            with contextlib.suppress(*ignored):
                checkpoints.close()
        memory = self._memory
        if memory is not None:  # After an error its states stay.
            memory.close(keeps=failed)
        if self._files is not None and (memory is None or not memory.folder.exists()):
            (self._files.path / MEMORY).unlink(missing_ok=True)

    def require_directory(self) -> RunDirectory:
        """The run directory.

        Raises:
          ConfigError: If there is none.
        """
        if self._files is None:
            raise ConfigError("Saving needs a directory: fit(..., run_dir=...).")
        return self._files

    def _folder(self, name: str) -> CheckpointFolder:
        files = self.require_directory()
        if name not in self._folders:
            keep = self._options.keep if name == LATEST else Keep(1)
            self._folders[name] = CheckpointFolder(
                files.path / name,
                keep=keep.newest,
                keep_every=keep.every_steps,
                storage=files.storage,
            )
        return self._folders[name]


class Checkpoints:
    """The checkpoints of your own loop.

    Writing continues in the background, and ends before the next save begins; `wait` waits for it
    after the last one. If the process ends meanwhile, the previous checkpoint is still there. Call
    `wait` before another object, of this process or another, saves there.

    Args:
      directory: Directory of the checkpoints of one training, on a file system that all processes
        share; made by the first save if it is missing. For `restore` also the run directory of
        `jddp.fit`.
      keep: Number of newest checkpoints that stay.

    Raises:
      ConfigError: If `keep` is below 1.
    """

    def __init__(self, directory: str | Path, *, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError(f"keep is at least 1; got {keep}.")
        self._directory = absolute(directory)
        self._keep = keep
        self._folder: CheckpointFolder | None = None  # Made by the first save.
        self._last: int | None = None  # Step of the checkpoint that was saved or restored last.

    def save(self, ddp: Trainable, state: TrainState, extra: object = None) -> None:
        """Saves a state, as `jddp.fit` does; returns once it is copied.

        Every process calls it. An error of the file system is logged, and loses only this
        checkpoint. Another state of the same step replaces it.

        Args:
          ddp: The `jddp.DataParallel` that has made the state.
          state: State from `init`, `step` or `restore`; the next step may take it.
          extra: Values that `restore` returns with the state: a position in the data, metrics,
            None. They may be numbers, text, bytes, and lists, tuples and dicts of them, and come
            back as they are.

        Raises:
          ConfigError: If `extra` holds anything else; if the directory belongs to a run of `fit`,
            or holds checkpoints that were not restored first, or of later steps.
          FileSystemError: If the directory cannot be made or written.
          NumericsError: If the state is not finite.
          ReplicaMismatchError: At the next call, if replicas that must be identical differ.
          UsageError: If a step has taken the state, or it is of another model.
        """
        ddp.check(state)
        step, folder = int(state.step), self._directory
        plain = to_plain(extra, "extra=")
        if _is_run(folder) or _is_run(folder.parent):
            raise ConfigError(
                f"{folder} belongs to a run of fit, which resumes only from its own checkpoints. "
                "Save into another directory; restore may read this one."
            )
        is_older = self._last is None or step < self._last
        if is_older and (there := self._newest_in(folder)) is not None:
            raise ConfigError(
                f"{folder} holds a checkpoint of step {there}, and this state of step {step} does "
                "not come from it. Call restore first, or choose another directory."
            )
        refuse_unsound(step, state)
        if self._folder is None:
            self._folder = CheckpointFolder(folder, keep=self._keep)
        beside = {"extra": plain, "world": dict(ddp.steps.topology)}
        self._folder.save(step, state, beside, ddp.steps.layouts(state))
        self._last = step

    def restore(self, ddp: Trainable) -> tuple[TrainState, Any] | None:
        """Returns the newest undamaged state, and its `extra` values.

        Every process calls it, after `ddp.init`. The state may be from another number of devices or
        processes, and its optimizer sharded or not. Nothing is written, so another process may be
        saving there; but a damaged checkpoint is renamed, and the one before it is read.

        Args:
          ddp: A `jddp.DataParallel`, of the same model and optimizer.

        Returns:
          The state and the extra values; None if there is no checkpoint. Checkpoints of `jddp.fit`
          have their run data in place of extra values.

        Raises:
          UsageError: If there was no `init`, which gives the form of the state.
          ConfigError: If the state is of another model or optimizer, with the paths that differ.
          FileSystemError: If there are checkpoints, but none is undamaged and readable.
        """
        like = ddp.latest
        if like is None:
            raise UsageError("restore needs a state of the same form. Call init first.")
        own = self._directory
        folder = own / LATEST if _is_run(own) else own
        if self._newest_in(folder) is None:
            return None
        with contextlib.closing(CheckpointFolder(folder, keep=1, is_written=False)) as checkpoints:
            found = checkpoints.restore(like, ddp.steps.layouts(like))
        assert found is not None  # `restore` raises if none is undamaged.
        plain = found.beside.get("extra", found.beside)
        self._last = found.step
        ddp.latest = found.state
        return found.state, from_plain(plain)

    def wait(self) -> None:
        """Waits until all is written. Call it after the last save.

        Raises:
          FileSystemError: If the last state could not be written.
        """
        if self._folder is not None:
            self._folder.wait()

    def _newest_in(self, folder: Path) -> int | None:
        """The newest step in a directory, as process 0 sees it; None for none, or no directory."""
        with contextlib.suppress(FileSystemError):
            self.wait()
        there = finished(folder) if os.path.isdir(folder) else []
        text = from_first("steps", json.dumps(max(there, default=None)), timeout_seconds=SECONDS)
        return json.loads(text)


def _is_run(folder: Path) -> bool:
    return os.path.exists(folder / "manifest.json")  # False if it cannot be read.
