"""`start`, the function behind `jddp.fit` and the command line.

It prepares the run directory, compares the processes of a job, and runs the training loop under a
watchdog. It knows a model only as an object that steps and evaluates.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax

from jddp.data import TrainBatches
from jddp.distributed.agree import agree
from jddp.distributed.coordination import take_sigterm_back
from jddp.distributed.schedulers import refuse_unjoined
from jddp.distributed.watchdog import Watchdog
from jddp.engine.host_rows import as_arrays
from jddp.engine.padding import refuse_padding
from jddp.engine.state import TrainState
from jddp.engine.trainable import Trainable
from jddp.errors import ConfigError
from jddp.trainer.arguments import check_callbacks, steps_left
from jddp.trainer.ending import close, run_to_the_end
from jddp.trainer.fingerprint import fingerprint
from jddp.trainer.given import compare_calls, refuse_same_rows
from jddp.trainer.loop import Loop
from jddp.trainer.options import Options
from jddp.trainer.out_of_memory import explained
from jddp.trainer.prefetch import Source
from jddp.trainer.reports.run_directory import RunDirectory
from jddp.trainer.resume import resume
from jddp.trainer.run import Run
from jddp.trainer.watching import watching
from jddp.typing import Batch, Batches

FirstState = TrainState | Callable[[Batch], TrainState]


def start(ddp: Trainable, batches: Batches, options: Options, state: FirstState | None) -> Run:
    """Trains to the end of the options, resuming from the last checkpoint in the run directory.

    Args:
      ddp: A `jddp.DataParallel`, or another `Trainable`.
      batches: This process's training batches, or a `Source` that has read the first.
      options: Length of the run, periods of what it does, and its files.
      state: Initial state, which is copied; or a function of the first batch that makes one, which
        the first step donates. None makes one from the seed of the options.
    """
    refuse_unjoined()
    take_sigterm_back()
    if state is None:
        state = functools.partial(ddp.init, options.seed)
    check_callbacks(options.callbacks)
    if options.num_steps is None:
        options = dataclasses.replace(options, num_steps=steps_left(batches))
    compare_calls(options, batches, state)
    for callback in watching(options.callbacks):
        callback.check_options(options)
    _refuse_epochs(options, batches)
    _refuse_padding(ddp, batches)
    if options.run_dir is None:
        with Watchdog(options.checks.limits, None) as watchdog:
            return _train(ddp, batches, options, state, None, watchdog)
    files = RunDirectory(options.run_dir, is_writer=jax.process_index() == 0)
    files.prepare(options.config, options.manifest)
    stacks = files.stacks(jax.process_index())
    with files.held(options.config), Watchdog(options.checks.limits, stacks) as watchdog:
        files.check_seen()
        return _train(ddp, batches, options, state, files, watchdog)


def _refuse_epochs(options: Options, batches: Batches) -> None:
    """Refuses periods in epochs of batches that know none."""
    if isinstance(batches, TrainBatches):
        return
    for name, number in options.settings.items():
        if name.endswith("_epochs") and number is not None:
            argument = name.replace("epochs", "steps")
            raise ConfigError(
                f"{argument}=Epochs({number:g}): these batches know no epochs. Give a number of "
                "steps, or batches of jddp.data.TrainBatches."
            )


def _refuse_padding(ddp: Trainable, batches: Batches) -> None:
    """Refuses batches that are padded, where the loss would count the padding."""
    if isinstance(batches, TrainBatches) and batches.is_padded:
        full = f"a global batch size that is a multiple of {ddp.steps.rows.num_micro_batches}"
        where = "drop_remainder=True of jddp.data.TrainBatches (data.drop_remainder of a config)"
        sums = ddp.steps.planned(as_arrays(batches.batch(0))).sums
        refuse_padding(sums, f"let batches be full: {full}, and {where}")


def _train(
    ddp: Trainable,
    batches: Batches,
    options: Options,
    state: FirstState,
    files: RunDirectory | None,
    watchdog: Watchdog,
) -> Run:
    """Trains under a watchdog, while the run directory is held; an error has `run`."""
    source = batches if isinstance(batches, Source) else Source(batches, ddp.shard_batch)
    batch = source.peek()
    refuse_same_rows("batches", batch, options)
    if jax.process_count() > 1:
        agree("model, optimizer or batch", fingerprint(ddp, batch))
    with explained(ddp, jax.eval_shape(lambda x: x, batch), watchdog):
        state = state(batch) if callable(state) else jax.tree.map(jax.numpy.copy, state)
        if options.evaluation.params == "ema" and state.ema_params is None:
            raise ConfigError("eval_params='ema' needs DataParallel(..., ema_decay=...).")
        loop = Loop(ddp, source, state, options, files, watchdog)
        try:
            try:
                resume(loop)
                run_to_the_end(loop)
            except BaseException:
                close(loop, failed=True)
                raise
            close(loop)
        except BaseException as error:
            vars(error)["run"] = loop.run
            raise
        finally:
            loop.reporter.close()  # behind the checkpoints: a process may be killed soon
        return loop.run
