"""`jddp.fit`: trains with evaluation, progress, metrics and checkpoints.

run = jddp.fit(ddp, batches, num_steps=1000, evaluate=test_batches, run_dir="runs/mine")
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jddp.config.permissions import folder_or_url
from jddp.distributed.watchdog import Limits
from jddp.engine.state import TrainState
from jddp.engine.trainable import Trainable
from jddp.names import refuses_unknown
from jddp.names.synonyms import OF_FIT
from jddp.trainer.arguments import choose_batches
from jddp.trainer.callbacks import Callback
from jddp.trainer.plan import Plan
from jddp.trainer.run import Run
from jddp.trainer.start import RunFiles, start
from jddp.typing import Batch, Batches

LIMITS = Limits()


@refuses_unknown("fit", OF_FIT)
def fit(
    ddp: Trainable,
    batches: Batches | None = None,
    *,
    data: Any = None,
    global_batch_size: int | None = None,
    num_epochs: float | None = None,
    num_steps: int | None = None,
    state: TrainState | Callable[[Batch], TrainState] | None = None,
    evaluate: Batches | Mapping[str, Any] | None = None,
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
    check_replicas_every_steps: int | None = 500,
    max_consecutive_skips: int = 10,
    same_batches: bool = False,
) -> Run:
    """Trains for `num_steps`, with evaluation, progress, metrics and checkpoints.

    Args:
      ddp: A `jddp.DataParallel`.
      batches: This process's training batches. An object with `get_state` and `set_state`
        resumes where it was; any other iterable is fast-forwarded.
      data: Instead of batches, a dict of arrays with a row for each example, or a data set of
        such, the same on every process; `seed` is that of their order too. For other options
        give `jddp.data.TrainBatches` as batches.
      global_batch_size: Examples per step, over all processes, of `data`.
      num_epochs: Number of passes over `data`; the last batch may be partial and is padded. A
        run that resumes ends with their last example, too.
      num_steps: Optimizer steps in all, those of a resumed run included; with `data` either
        these or epochs.
      state: The state to start from, which is copied, so that it stays yours, with
        `run.evaluate()` of an earlier run: the devices hold both as long as you keep it. A
        function of the first batch that makes the state holds but one. By default
        `init(seed, <the first batch>)`.
      evaluate: This process's evaluation batches, iterated from the beginning each time; or a
        dict of arrays, the same on every process.
      run_dir: Directory for metrics and checkpoints, or its URL, such as "s3://bucket/run",
        for which fsspec needs `jddp[s3]` or the like; None keeps nothing.
      callbacks: Objects as `jddp.Callback` describes them.
      seed: Seed of the first state's PRNG key.
      log_every_steps: Steps between train records.
      eval_every_steps: Steps between evaluations; None is once, at the end.
      save_every_steps: Steps between checkpoints; None is once, at the end.
      keep: Number of newest checkpoints that stay.
      keep_every_steps: Number of steps at whose multiples checkpoints stay too.
      resume: "auto" (resume if there is a checkpoint), "never" (there must be none), "must", or
        "changed" (as "auto", also with another model, loss or optimizer than the run's).
      eval_params: Parameters to evaluate, "params" or "ema".
      learning_rate: Learning rate of a step, for the records.
      config: Settings kept in the run directory; a directory with other ones is refused.
      manifest: Facts kept beside them.
      limits: Seconds that a phase may take before its processes are reported as hanging.
      check_replicas_every_steps: Steps between comparisons of all replicas; None for no
        comparison.
      max_consecutive_skips: Number of steps in a row which `skip_nonfinite` leaves out that
        end the run.
      same_batches: Whether all processes are given the same rows on purpose, as in a benchmark.
        Otherwise a first batch that several have is refused: of `jddp.data.TrainBatches` and
        `eval_batches` each reads its own rows.

    Returns:
      The finished run: its state, its metrics, its directory.

    Raises:
      ConfigError: If an option is unknown or breaks its rule, or the run directory holds
        another run, or is in use.
      UsageError: If batches are padded, and the loss or a metric is a scalar, or a `jddp.Mean`
        of scalars; or if a step has taken the state.
      DataError: If the batches end before `num_steps`.
      ProcessMismatchError: If processes have different models, optimizers, batches or
        arguments, or the same rows.
      ReplicaMismatchError: If state differs that must be the same on all replicas.
      OutOfMemoryError: If a device has less memory than a step needs.
      NumericsError: If the loss is not finite, or too many steps in a row were skipped.
    """
    sizes = {"global_batch_size": global_batch_size, "num_epochs": num_epochs, "seed": seed}
    batches, evaluate, length = choose_batches(
        batches, data, evaluate, num_steps, multiple_of=ddp.steps.rows.num_micro_batches, **sizes
    )
    if state is not None and not callable(state):
        ddp.check(state)
    plan = Plan(
        **length,
        log_every_steps=log_every_steps,
        eval_every_steps=eval_every_steps,
        save_every_steps=save_every_steps,
        keep=keep,
        keep_every_steps=keep_every_steps,
        resume=resume,
        evaluation=evaluate,
        eval_params=eval_params,
        learning_rate=learning_rate,
        check_replicas_every_steps=check_replicas_every_steps,
        max_consecutive_skips=max_consecutive_skips,
        same_batches=same_batches,
    )
    directory = None if run_dir is None else folder_or_url(run_dir)
    # Copies, which you do not change while the run keeps them.
    kept = RunFiles(directory, copy.deepcopy(config), copy.deepcopy(manifest or {}))
    return start(ddp, batches, plan, kept, state, callbacks, limits)
