"""`train`, the function behind `jddp.DataParallel.fit` and the command line.

It prepares the run directory, compares the processes of a job, and runs the training loop under a
watchdog. It knows the model only as an object that steps and evaluates.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jddp.config.versions import versions
from jddp.distributed.agreement import agree
from jddp.distributed.watchdog import Limits, Watchdog
from jddp.engine.mesh import as_arrays
from jddp.engine.state import TrainState
from jddp.errors import ConfigError
from jddp.trainer.callbacks import Callback
from jddp.trainer.fingerprint import fingerprint
from jddp.trainer.loop import Loop
from jddp.trainer.out_of_memory import explained
from jddp.trainer.plan import Plan
from jddp.trainer.prefetch import Source
from jddp.trainer.reports.run_directory import RunDirectory
from jddp.trainer.run import Run
from jddp.typing import Batch, Batches

LIMITS = Limits()


class Kept(NamedTuple):
    """The files of a run.

    Attributes:
      directory: Folder for metrics and checkpoints; None keeps nothing.
      config: Settings of the run; a directory with other ones is refused.
      manifest: Further facts, such as versions.
    """

    directory: Path | None
    config: Mapping[str, Any] | None
    manifest: Mapping[str, Any]


def train(
    ddp: Any,
    batches: Batches,
    plan: Plan,
    kept: Kept,
    state: TrainState | Callable[[Batch], TrainState],
    callbacks: Sequence[Callback],
    limits: Limits,
) -> Run:
    """Trains to the end of the plan, resuming from the last checkpoint in the run directory.

    Args:
      ddp: Usually a `jddp.DataParallel`.
      batches: This process's training batches.
      plan: Length of the run, and periods of what it does.
      kept: Files of the run.
      state: Initial state, which the first step donates; or a function of the first batch that
        makes it.
      callbacks: Objects as `jddp.Callback` describes them.
      limits: Seconds that a phase may take before its processes are reported as hanging.
    """
    if plan.resume == "must" and kept.directory is None:
        raise ConfigError("resume='must' needs run_dir=, where the run was saved.")
    files, manifest = None, {"versions": versions(), **kept.manifest}
    if kept.directory is not None:
        files = RunDirectory(kept.directory, is_writer=jax.process_index() == 0)
        files.prepare(kept.config, manifest)
    source = Source(batches, ddp.shard_batch)
    stacks = None if files is None else files.stacks(jax.process_index())
    held = contextlib.nullcontext() if files is None else files.held(kept.config)
    with held, Watchdog(limits, stacks) as watchdog:
        batch = source.peek()
        if jax.process_count() > 1:
            agree("model, optimizer or batch", fingerprint(ddp, batch))
        with explained(ddp, jax.eval_shape(lambda x: x, as_arrays(batch)), watchdog):
            if not isinstance(state, TrainState):
                state = state(batch)
            if plan.eval_params == "ema" and state.ema_params is None:
                raise ConfigError("eval_params='ema' needs DataParallel(..., ema_decay=...).")
            about = {"config": kept.config, "manifest": manifest, "plan": plan.settings}
            loop = Loop(ddp, source, state, plan, files, callbacks, about, watchdog)
            try:
                loop.resume()
                loop.run_to_the_end()
            except BaseException as error:
                vars(error)["run"] = loop.run
                loop.close(failed=True)
                raise
            loop.close()
            return loop.run
