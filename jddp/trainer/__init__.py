"""The trainer: from a state and batches to a finished run.

It steps, evaluates, reports, saves and stops, and knows the model only by what it does for it
(`Trainable`). `jddp.DataParallel.fit` and the command line run this same function.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jddp.callbacks import Callback
from jddp.cluster.agreement import agree
from jddp.cluster.watchdog import Limits, Watchdog
from jddp.errors import ConfigError
from jddp.mesh import as_arrays
from jddp.reports import RunDirectory
from jddp.run import Run
from jddp.state import TrainState
from jddp.trainer.loop import Loop
from jddp.trainer.out_of_memory import explained
from jddp.trainer.plan import Plan
from jddp.trainer.source import Source
from jddp.trainer.trainable import Trainable
from jddp.versions import versions

PyTree = Any

LIMITS = Limits()

__all__ = ["Trainable", "train"]


def train(
    ddp: Trainable,
    batches: Iterable[PyTree],
    *,
    num_steps: int,
    state: TrainState | None = None,
    evaluate: Iterable[PyTree] | None = None,
    run_dir: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
    log_every_steps: int = 50,
    eval_every_steps: int | None = None,
    save_every_steps: int | None = None,
    keep: int = 3,
    keep_every_steps: int | None = None,
    resume: str = "auto",
    eval_params: str = "params",
    learning_rate: Callable[[int], Any] | None = None,
    config: Mapping[str, Any] | None = None,
    manifest: Mapping[str, Any] | None = None,
    limits: Limits = LIMITS,
    compare_every_steps: int | None = 500,
    max_consecutive_skips: int = 10,
) -> Run:
    """Trains until `num_steps` optimizer steps are finished, going on where the run was.

    Args:
      ddp: Usually a `jddp.DataParallel`.
      batches: This process's training batches.
      num_steps: In all, those before a resume included.
      state: To start from, where it stands; by default `ddp.init(seed, <the first batch>)`.
      evaluate: This process's evaluation batches, iterated anew each time.
      run_dir: For metrics and checkpoints; None keeps nothing.
      callbacks: See `jddp.Callback`.
      seed: Of the first state.
      log_every_steps: Steps between train records.
      eval_every_steps: Steps between evaluations; None is once, at the end.
      save_every_steps: Steps between checkpoints; None is once, at the end.
      keep: The newest checkpoints, which stay.
      keep_every_steps: Checkpoints of multiples of it stay too.
      resume: "auto" (go on if there is a checkpoint), "never" (there must be none), "must".
      eval_params: "params" or "ema".
      learning_rate: Of a step, for the records.
      config: Kept in the run directory; another one there is refused.
      manifest: Kept beside it.
      limits: Of what a phase may take before its processes are said to hang.
      compare_every_steps: Steps between comparisons of all replicas; None never compares.
      max_consecutive_skips: Of steps that `skip_nonfinite` leaves out; as many in a row end the
        run.

    Returns:
      The finished run.

    Raises:
      ConfigError: If an option breaks its rule, or the run directory holds another run, or is in
        use.
      DataError: If the batches end before `num_steps`.
      DisagreementError: If processes have different models, optimizers or batches.
      DivergenceError: If what replicas have to have alike differs.
      OutOfMemoryError: If a device has less memory than a step needs.
      NumericsError: If the loss is not finite, or too many steps in a row were skipped.
    """
    plan = Plan(
        num_steps=num_steps,
        log_every_steps=log_every_steps,
        eval_every_steps=eval_every_steps,
        save_every_steps=save_every_steps,
        keep=keep,
        keep_every_steps=keep_every_steps,
        resume=resume,
        evaluation=evaluate,
        eval_params=eval_params,
        learning_rate=learning_rate,
        compare_every_steps=compare_every_steps,
        max_consecutive_skips=max_consecutive_skips,
    )
    if resume == "must" and run_dir is None:
        raise ConfigError("resume='must' needs run_dir=, where the run was saved.")
    files, manifest = None, {"versions": versions(), **(manifest or {})}
    if run_dir is not None:
        files = RunDirectory(Path(run_dir), is_writer=jax.process_index() == 0)
        files.prepare(config, manifest)
    source = Source(batches, ddp.put)
    stacks = None if files is None else files.stacks(jax.process_index())
    held = contextlib.nullcontext() if files is None else files.held()
    with held, Watchdog(limits, stacks) as watchdog:
        batch = source.peek()
        if jax.process_count() > 1:
            agree("model, optimizer or batch", ddp.facts(batch))
        with explained(ddp, jax.eval_shape(lambda x: x, as_arrays(batch)), watchdog):
            if state is None:
                state = ddp.init(seed, batch)
            if eval_params == "ema" and state.ema_params is None:
                raise ConfigError("eval_params='ema' needs DataParallel(..., ema_decay=...).")
            about = {"config": config, "manifest": manifest}
            loop = Loop(ddp, source, state, plan, files, callbacks, about, watchdog)
            try:
                loop.resume()
                run = loop.run_to_the_end()
            except BaseException:
                loop.abandon()
                raise
            loop.close()
            return run
