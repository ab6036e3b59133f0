"""`jddp.fit`: trains with evaluation, progress, metrics and checkpoints.

run = jddp.fit(ddp, batches, num_steps=1000, evaluate=test_batches, run_dir="runs/mine")
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jax.typing import ArrayLike

from jddp.config.permissions import folder_or_url
from jddp.config.versions import versions
from jddp.data import TrainBatches, eval_batches
from jddp.distributed.watchdog import Limits
from jddp.engine.state import TrainState
from jddp.engine.trainable import Trainable
from jddp.names import refuses_unknown
from jddp.names.synonyms import OF_FIT
from jddp.trainer.arguments import epochs_of, steps_left
from jddp.trainer.callbacks import Callback
from jddp.trainer.plan import Plan
from jddp.trainer.run import Run
from jddp.trainer.start import start
from jddp.typing import Batch, Batches, Settings

LIMITS = Limits()


@refuses_unknown("fit", OF_FIT)
def fit(
    ddp: Trainable,
    batches: Batches | None = None,
    *,
    data: object = None,
    global_batch_size: int | None = None,
    num_epochs: float | None = None,
    num_steps: int | None = None,
    state: TrainState | Callable[[Batch], TrainState] | None = None,
    evaluate: Batches | Mapping[str, object] | None = None,
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
    learning_rate: Callable[[int], ArrayLike] | None = None,
    config: Settings | None = None,
    manifest: Settings | None = None,
    limits: Limits = LIMITS,
    check_replicas_every_steps: int | None = 500,
    max_consecutive_skips: int = 10,
    same_batches: bool = False,
) -> Run:
    """Trains for `num_steps`, with evaluation, progress, metrics and checkpoints.

    Args:
      ddp: A `jddp.DataParallel`.
      batches: This process's training batches. An object with `get_state` and `set_state`
        resumes at its position; any other iterable is fast-forwarded.
      data: Instead of batches: a dict of arrays with a row for each example, or a data set of
        such rows, the same on every process. `seed` also seeds the order of its examples. For
        other options pass `jddp.data.TrainBatches` as batches.
      global_batch_size: Examples per step of `data`, over all processes.
      num_epochs: Number of passes over `data`; the last batch may be partial and is padded. A
        resumed run ends with the last example of these passes, too.
      num_steps: Total number of optimizer steps, including steps before a resume; with `data`
        give either steps or epochs.
      state: The state to start from. It is copied and stays usable, but the devices hold both as
        long as you keep it. A function that makes the state from the first batch avoids the
        copy. By default `init(seed, <the first batch>)`.
      evaluate: This process's evaluation batches, iterated from the beginning each time; or a
        dict of arrays, the same on every process.
      run_dir: Directory for metrics and checkpoints, or its URL, such as "s3://bucket/run", for
        which fsspec needs an extra such as `jddp[s3]`; None keeps nothing.
      callbacks: Objects with the methods of `jddp.Callback`.
      seed: Seed of the first state's PRNG key.
      log_every_steps: Steps between train records.
      eval_every_steps: Steps between evaluations; None evaluates once, at the end.
      save_every_steps: Steps between checkpoints; None saves once, at the end.
      keep: Number of newest checkpoints that stay.
      keep_every_steps: Interval in steps; checkpoints at its multiples stay too.
      resume: "auto" (resume if there is a checkpoint), "never" (there must be none), "must"
        (there must be one), or "changed" (like "auto", even if model, loss or optimizer changed).
      eval_params: Parameters to evaluate, "params" or "ema".
      learning_rate: Learning rate as a function of the step, for the records.
      config: Settings to keep in the run directory; a directory with others is refused.
      manifest: Facts to keep beside the settings.
      limits: Seconds that a phase may take before its processes are reported as hanging.
      check_replicas_every_steps: Steps between comparisons of all replicas; None for no
        comparison.
      max_consecutive_skips: Number of steps in a row, skipped by `skip_nonfinite`, that ends the
        run.
      same_batches: Whether all processes get the same rows on purpose, as in a benchmark.
        Otherwise a first batch that several processes have is refused. With
        `jddp.data.TrainBatches` and `eval_batches` each process reads its own rows.

    Returns:
      The finished run: its state, its metrics, its directory.

    Raises:
      ConfigError: If an option is unknown or breaks its rule, or the run directory holds
        another run, or is in use.
      UsageError: If batches are padded while the loss or a metric is a scalar, or a `jddp.Mean`
        of scalars; or if a step has already taken the state.
      DataError: If the batches end before `num_steps`.
      ProcessMismatchError: If processes have different models, optimizers, batches or
        arguments, or the same rows.
      ReplicaMismatchError: If replicas that must be identical differ.
      OutOfMemoryError: If a device has less memory than a step needs.
      NumericsError: If the loss is not finite, or too many steps in a row were skipped.
    """
    num_epochs = epochs_of(batches, data, global_batch_size, num_steps, num_epochs)
    if batches is None:
        assert global_batch_size is not None, "it was checked"
        batches = TrainBatches(
            data,
            global_batch_size=global_batch_size,
            num_epochs=num_epochs,
            seed=seed,
            multiple_of=ddp.steps.rows.num_micro_batches,
        )
    if isinstance(evaluate, Mapping):
        evaluate = eval_batches(evaluate, global_batch_size=global_batch_size or 1024)
    if state is not None and not callable(state):
        ddp.check(state)
    plan = Plan(
        num_steps=steps_left(batches) if num_steps is None else num_steps,
        num_epochs=num_epochs,
        seed=seed,
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
        run_dir=None if run_dir is None else folder_or_url(run_dir),
        # Copies, which the caller does not change while the run keeps them.
        config=copy.deepcopy(config),
        manifest={"versions": versions(), **copy.deepcopy(manifest or {})},
        callbacks=callbacks,
        limits=limits,
    )
    return start(ddp, batches, plan, state)
