"""Restores a run from its newest checkpoint, and saves states that are finite."""

import contextlib

import jax
import jax.numpy as jnp

from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.checkpoint.restore import Restored
from jddp.distributed.coordination import gather
from jddp.engine.state import TrainState, is_float
from jddp.engine.trainable import Trainable
from jddp.errors import ConfigError, Error, FileSystemError, NumericsError
from jddp.trainer.options import Keep, Options
from jddp.trainer.progress import Progress
from jddp.trainer.reports.run_directory import RunDirectory

LATEST = "checkpoints"  # the folder to resume from; other folders hold one checkpoint
BEST = "best"  # the folder of the checkpoints that are kept for their evaluations
SECONDS = 2.0  # between the first and the last process that fail with the same mistake


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
            f"The state is not finite after step {step}: a loss, a gradient or an update was not. "
            "It is not saved; the last checkpoint is older. skip_nonfinite=True leaves out "
            "such steps."
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

    def restore(self, state: TrainState) -> Restored | None:
        """The newest checkpoint, placed on the devices like `state`; None if there is none.

        Raises:
          ConfigError: If there must be a checkpoint and there is none, or the other way round.
        """
        latest = self._folder(LATEST)
        steps, path = latest.steps(), self._files and self._files.where
        if not steps and self._options.resume == "must":
            raise ConfigError(
                f"resume='must', but {path} holds no checkpoint. Choose the run.dir of a run that "
                "was saved, or resume='auto'."
            )
        if steps and self._options.resume == "never":
            raise ConfigError(
                f"{path} holds a run at step {steps[-1]}, and resume='never' would overwrite it. "
                "Choose another run.dir, or resume='auto'."
            )
        if (restored := latest.restore(state, self._ddp.steps.layouts(state))) is not None:
            self._last[LATEST] = restored.step, restored.beside.get("stopped")
        return restored

    def save(self, where: str, state: TrainState, progress: Progress) -> None:
        """Starts writing a state, unless it is the one that was saved or restored last.

        Raises:
          NumericsError: If a run could not resume from it.
        """
        refuse_unsound(progress.step, state)
        if (now := (progress.step, progress.stopped)) != self._last.get(where):
            folder = self._folder(where)
            if where == BEST:
                folder.keep_only(progress.best)
            layouts = self._ddp.steps.layouts(state)
            folder.save(progress.step, state, progress.to_json(), layouts)
            self._last[where] = now

    def all_are_at(self, step: int) -> bool:
        """Whether all processes call this for the same step, within seconds of each other."""
        with contextlib.suppress(TimeoutError, jax.errors.JaxRuntimeError):
            return bool(gather(f"saved at an error/{step}", "", timeout_seconds=SECONDS))
        return False

    def settle(self) -> None:
        """Waits for the newest checkpoint, if a process that fails would interrupt its writing.

        Errors of the file system have been logged; `close` raises them.
        """
        if jax.process_count() > 1:
            with contextlib.suppress(FileSystemError):
                self.wait()

    def wait(self) -> None:
        """Waits until the newest checkpoint is written."""
        self._folder(LATEST).wait()

    def close(self, *, failed: bool) -> None:
        """Waits for all checkpoints; after a failure, which raises its own error, only if alone."""
        if failed and jax.process_count() > 1:
            return  # Others may wait for this process, as it would for them.
        ignored = (Error,) if failed else ()
        for checkpoints in self._folders.values():
            with contextlib.suppress(*ignored):
                checkpoints.close()

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
