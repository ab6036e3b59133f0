"""`start`, the function behind `jddp.fit` and the command line.

It prepares the run directory, compares the processes of a job, and runs the training loop under a
watchdog. It knows a model only as an object that steps and evaluates.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jddp.config.versions import versions
from jddp.data import TrainBatches, WorkerBatches
from jddp.distributed.coordination import agree, take_sigterm_back
from jddp.distributed.unjoined import refuse_unjoined
from jddp.distributed.watchdog import Limits, Watchdog
from jddp.engine.host_rows import as_arrays
from jddp.engine.padding import refuse_padding
from jddp.engine.state import TrainState
from jddp.engine.trainable import Trainable
from jddp.errors import ConfigError, Error
from jddp.trainer.arguments import check_callbacks
from jddp.trainer.callbacks import Callback
from jddp.trainer.fingerprint import fingerprint
from jddp.trainer.given import compare_calls, refuse_same_rows
from jddp.trainer.loop import Loop
from jddp.trainer.out_of_memory import explained
from jddp.trainer.plan import Plan
from jddp.trainer.prefetch import Source
from jddp.trainer.reports.run_directory import RunDirectory
from jddp.trainer.run import Run
from jddp.trainer.watching import watching
from jddp.typing import Batch, Batches


class RunFiles(NamedTuple):
    """The files of a run.

    Attributes:
      directory: Folder for metrics and checkpoints, or its URL; None keeps nothing.
      config: Settings of the run; a directory with different settings is refused.
      manifest: Further facts, such as versions.
    """

    directory: str | Path | None
    config: Mapping[str, Any] | None
    manifest: Mapping[str, Any]


def start(
    ddp: Trainable,
    batches: Batches,
    plan: Plan,
    kept: RunFiles,
    state: TrainState | Callable[[Batch], TrainState] | None,
    callbacks: Sequence[Callback],
    limits: Limits,
) -> Run:
    """Trains to the end of the plan, resuming from the last checkpoint in the run directory.

    Args:
      ddp: A `jddp.DataParallel`, or another `Trainable`.
      batches: This process's training batches.
      plan: Length of the run, and periods of what it does.
      kept: Files of the run.
      state: Initial state, which is copied; or a function of the first batch that makes one, which
        the first step donates. None makes one from the plan's seed.
      callbacks: Objects with the methods of `jddp.Callback`.
      limits: Seconds that a phase may take before its processes are reported as hanging.
    """
    refuse_unjoined()
    take_sigterm_back()
    state = functools.partial(ddp.init, plan.seed) if state is None else state
    check_callbacks(callbacks)
    compare_calls(plan, kept.directory, batches, state)
    if plan.resume == "must" and kept.directory is None:
        raise ConfigError("resume='must' needs run_dir=, where the run was saved.")
    for callback in watching(callbacks):
        callback.check_plan(plan, kept.directory)
    if isinstance(batches, TrainBatches | WorkerBatches) and batches.is_padded:
        full = f"a global batch size that is a multiple of {ddp.steps.rows.num_micro_batches}"
        where = "drop_remainder=True of jddp.data.TrainBatches (data.drop_remainder of a config)"
        sums = ddp.steps.planned(batches.batch(0)).sums
        refuse_padding(sums, f"let batches be full: {full}, and {where}")
    files, manifest = None, {"versions": versions(), **kept.manifest}
    if kept.directory is not None:
        files = RunDirectory(kept.directory, is_writer=jax.process_index() == 0)
        files.prepare(kept.config, manifest)
    source = Source(batches, ddp.shard_batch)
    stacks = None if files is None else files.stacks(jax.process_index())
    held = contextlib.nullcontext() if files is None else files.held(kept.config)
    with held, Watchdog(limits, stacks) as watchdog:
        if files is not None:
            files.check_seen()
        batch = as_arrays(source.peek())
        refuse_same_rows("batches", batch, plan)
        if jax.process_count() > 1:
            agree("model, optimizer or batch", fingerprint(ddp, batch))
        with explained(ddp, jax.eval_shape(lambda x: x, batch), watchdog):
            state = state(batch) if callable(state) else jax.tree.map(jax.numpy.copy, state)
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
            try:
                loop.close()
            except Error as error:
                vars(error)["run"] = loop.run
                raise
            return loop.run
