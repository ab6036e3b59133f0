"""`jddp.fit`: trains with evaluation, progress, metrics and checkpoints.

    run = jddp.fit(ddp, batches, num_steps=1000, evaluate=test_batches, run_dir="runs/mine")

`start`, which the command line calls too, prepares the run directory, compares the processes of a
job, and runs the training loop under a watchdog. It knows a model only as an object that steps and
evaluates. Processes with different arguments would hang in a collective, or compute nonsense.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from jddp.data import Epochs, TrainBatches, eval_batches
from jddp.data.batches import Share
from jddp.distributed.coordination import agree, from_first, refuse_unjoined, take_sigterm_back
from jddp.distributed.watchdog import Watchdog
from jddp.engine.calls import connect
from jddp.engine.compiled import Trainable
from jddp.engine.evaluation import refuse_padding
from jddp.engine.replay import refuse_replay
from jddp.engine.state import TrainState, by_path
from jddp.ground.errors import ConfigError, FileSystemError, OutOfMemoryError
from jddp.ground.files import folder_or_url
from jddp.ground.names import RUN_ENDED, added, refuses_unknown
from jddp.ground.names.synonyms import OF_FIT
from jddp.ground.typing import Batch, Batches
from jddp.modules.rows import as_arrays
from jddp.trainer import run
from jddp.trainer.loop import Loop, run_to_the_end
from jddp.trainer.prefetch import Source, refuse_same_rows
from jddp.trainer.reports.run_directory import RunDirectory
from jddp.trainer.reports.sinks import GivenSink, choose_sinks
from jddp.trainer.resume import resume
from jddp.trainer.watching import watching


@refuses_unknown("fit", OF_FIT)
def fit(
    ddp: Trainable,
    batches: Batches | Mapping[str, object],
    *,
    global_batch_size: int | None = None,
    num_steps: int | None = None,
    num_epochs: float | None = None,
    state: TrainState | Callable[[Batch], TrainState] | None = None,
    evaluate: Batches | Mapping[str, object] | run.Evaluation | None = None,
    eval_every_steps: int | Epochs | None = None,
    run_dir: str | Path | None = None,
    save_every_steps: int | Epochs | str | None = None,
    keep: int | run.Keep = 3,
    resume: str = "auto",
    callbacks: Sequence[run.Callback] = (),
    sinks: Sequence[GivenSink] = (),
    seed: int = 0,
    log_every_steps: int | Epochs = 50,
    learning_rate: Callable[[int], jax.typing.ArrayLike] | None = None,
    checks: run.Checks = run.CHECKS,
) -> run.Run:
    """Trains for `num_steps`, with evaluation, progress, metrics and checkpoints.

    Args:
      ddp: A `jddp.DataParallel`.
      batches: This process's training batches. An object with `get_state` and `set_state`
        resumes at its position; any other iterable is fast-forwarded. With `global_batch_size`
        the examples themselves, the same on every process: a dict of arrays with a row for each,
        or a data set of such rows. `seed` also seeds their order. For other options pass
        `jddp.data.TrainBatches`.
      global_batch_size: Examples per step, over all processes, where `batches` are examples.
      num_steps: Total number of optimizer steps, including steps before a resume.
      num_epochs: Instead of steps, the number of passes over examples; the last batch may be
        partial and is padded. A resumed run ends with the last example of these passes, too.
      state: The state to start from. It is copied and stays usable, but the devices hold both as
        long as you keep it. A function that makes the state from the first batch avoids the
        copy. By default `init(seed, <the first batch>)`.
      evaluate: This process's evaluation batches, iterated from the beginning each time; or a
        dict of arrays, the same on every process; or a `jddp.Evaluation`.
      eval_every_steps: Steps between evaluations, or `jddp.data.Epochs(1)`; None evaluates once, at
        the end. Epochs are known of examples and of `jddp.data.TrainBatches`.
      run_dir: Directory for metrics and checkpoints, or its URL, such as "s3://bucket/run", for
        which fsspec needs an extra such as `jddp[s3]`; None keeps nothing.
      save_every_steps: Steps between checkpoints, or epochs; "continuous" saves when the last save
        has ended, and None once, at the end.
      keep: Number of newest checkpoints that stay, or a `jddp.Keep`.
      resume: "auto" (resume if there is a checkpoint), "never" (there must be none), "must"
        (there must be one), or "changed" (like "auto", even if model, loss or optimizer changed).
      callbacks: Objects with the methods of `jddp.Callback`.
      sinks: Sinks, which get the records on process 0 too: "tensorboard", "wandb", or objects with
        the methods `log(record)` and `close()`, or functions that make one for a run.
      seed: Seed of the first state's PRNG key.
      log_every_steps: Steps between train records, or epochs.
      learning_rate: Learning rate as a function of the number of steps that were taken before,
        for the records.
      checks: Checks of the run: replicas stay equal, not all steps are skipped, processes have rows
        of their own, and none hangs.

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
    are_batches = global_batch_size is None
    if are_batches and isinstance(batches, Mapping):  # A dict iterates over its keys.
        raise ConfigError("global_batch_size= is missing, by which a dict of arrays is split.")
    if not are_batches and isinstance(batches, TrainBatches):
        raise ConfigError(f"{global_batch_size=} splits data, and these are batches already.")
    if num_steps is not None and num_epochs is not None:
        raise ConfigError("num_steps= and num_epochs= exclude each other: give one of them.")
    own = batches.num_epochs if isinstance(batches, TrainBatches) else None
    if num_epochs is not None and are_batches and own != num_epochs:
        raise ConfigError(
            f"{num_epochs=} counts passes over arrays, which need global_batch_size=, or over "
            f"jddp.data.TrainBatches({num_epochs=}). For other batches give num_steps=."
        )
    if num_steps is None and num_epochs is None:
        num_epochs = own  # The run ends with the last epoch of its batches.
        if own is None:
            other = "" if are_batches else ", or num_epochs="
            raise ConfigError(f"num_steps= is missing: fit(ddp, batches, num_steps=...){other}.")
    if global_batch_size is not None:
        batches = TrainBatches(
            batches,
            global_batch_size=global_batch_size,
            num_epochs=num_epochs,
            seed=seed,
            multiple_of=ddp.steps.rows.num_micro_batches,
        )
    evaluation = evaluate if isinstance(evaluate, run.Evaluation) else run.Evaluation(evaluate)
    if isinstance(evaluation.batches, Mapping):
        size = global_batch_size or run.EVAL_BATCH_SIZE
        tests = eval_batches(evaluation.batches, global_batch_size=size)
        evaluation = dataclasses.replace(evaluation, batches=tests)
    if state is not None and not callable(state):
        ddp.check(state)
    options = run.Options(
        num_steps=num_steps,
        num_epochs=num_epochs,
        log_every_steps=log_every_steps,
        eval_every_steps=eval_every_steps,
        save_every_steps=save_every_steps,
        keep=keep if isinstance(keep, run.Keep) else run.Keep(keep),
        resume=resume,
        evaluation=evaluation,
        learning_rate=learning_rate,
        checks=checks,
        seed=seed,
        run_dir=None if run_dir is None else folder_or_url(run_dir),
        callbacks=tuple(callbacks),
        sinks=choose_sinks(sinks, key="sinks"),
    )
    return start(ddp, batches, options, state)


SECONDS = 600.0  # Limit for process 0 to write the remaining records.
log = logging.getLogger("jddp")
METHODS = [name for name in vars(run.Callback) if name.startswith("on_")]
FirstState = TrainState | Callable[[Batch], TrainState]
# Words of a device that is out of memory. `tests/trainer/test_out_of_memory.py` has whole messages.
WORDS = (
    r"[Oo]ut of memory|OUT_OF_MEMORY|[Ff]ailed to allocate",  # XLA, CUDA, NCCL
    r"CU[A-Z]+_STATUS_ALLOC_FAILED|the resource allocation failed",  # cuDNN, cuBLAS, cuSOLVER
    # Any other lack of memory, except the memory that the threads of one kernel share.
    r"RESOURCE_EXHAUSTED: (?!(?:Shared|Tensor) memory size limit)[^\n]*[Mm]emory",
    # Libraries that do not start, mostly because they lack memory.
    r"DNN library initialization failed|[Cc]ould not create cudnn handle",
    r"[Ff]ailed to create cublas handle",
)
_OTHER_USES = (
    "jddp.train --dry-run, or jddp.memory, finds what would fit. If a step fits, something else "
    "takes the memory: another program on the device (nvidia-smi lists them), arrays that this "
    "program keeps, larger batches in evaluation, fragmentation, or cuDNN, cuBLAS, NCCL and CUDA "
    "graphs, for which a smaller XLA_CLIENT_MEM_FRACTION leaves more. Or the version of a library "
    "is not the one that JAX needs."
)


def start(
    ddp: Trainable, batches: Batches, options: run.Options, state: FirstState | None
) -> run.Run:
    """Trains to the end of the options, resuming from the last checkpoint in the run directory.

    Args:
      ddp: A `jddp.DataParallel`, or another `Trainable`.
      batches: This process's training batches, or a `Source` that has read the first.
      options: Length of the run, periods of its actions, and its files.
      state: Initial state, which is copied; or a function of the first batch that makes one, which
        the first step donates. None makes one from the seed of the options.

    Raises:
      ConfigError: If a callback or a period does not fit.
      ProcessMismatchError: On every process, if an argument differs.
    """
    refuse_unjoined()
    take_sigterm_back()
    if state is None:
        state = functools.partial(ddp.init, options.seed)
    for number, callback in enumerate(options.callbacks):
        if isinstance(callback, type) or not all(hasattr(callback, name) for name in METHODS):
            raise ConfigError(
                f"callbacks[{number}] is {callback!r}. Give an object, not a class, with the "
                "methods of jddp.Callback."
            )
    if options.num_steps is None:
        assert isinstance(batches, TrainBatches), "others have a number of steps"
        # No position is left if the run starts from another run that has ended.
        num_left = max(1, len(batches.positions_left()))
        options = dataclasses.replace(options, num_steps=num_left)
    if jax.process_count() > 1:
        evaluation = options.evaluation.batches
        facts = {
            **options.common,
            "state": "a function" if callable(state) else "a state",
            "run_dir": "none" if options.run_dir is None else "given",
            **_about("batches", batches, options.num_steps),
            "evaluate": "none" if evaluation is None else "given",
            **_about("evaluate", evaluation, None),
        }
        agree("call of fit", {name: str(value) for name, value in facts.items()})
    for callback in watching(options.callbacks):
        callback.check_options(options)
    if options.checks.replay_every_steps is not None:
        refuse_replay(ddp.steps.spec, ddp.mesh)
    _check_batches(ddp, batches, options)
    if options.run_dir is None:
        with Watchdog(options.checks.limits, None) as watchdog:
            return _train(ddp, batches, options, state, None, watchdog)
    files = RunDirectory(options.run_dir, is_writer=jax.process_index() == 0)
    stacks = files.stacks(jax.process_index())
    held = files.held(options.config, options.manifest)
    with held, Watchdog(options.checks.limits, stacks) as watchdog:
        files.check_seen()
        return _train(ddp, batches, options, state, files, watchdog)


def _check_batches(ddp: Trainable, batches: Batches, options: run.Options) -> None:
    """Refuses periods in epochs of batches that know none, and padding that a loss would count."""
    if not isinstance(batches, TrainBatches):
        for name, every in options.periods.items():
            if isinstance(every, Epochs):
                raise ConfigError(f"{name}={every!r}: these batches know no epochs. Give steps.")
    elif batches.is_padded:
        full = f"a global batch size that is a multiple of {ddp.steps.rows.num_micro_batches}"
        where = "drop_remainder=True of jddp.data.TrainBatches (data.drop_remainder of a config)"
        sums = ddp.steps.planned(as_arrays(batches.batch(0))).sums
        refuse_padding(sums, f"let batches be full: {full}, and {where}")


def _train(
    ddp: Trainable,
    batches: Batches,
    options: run.Options,
    state: FirstState,
    files: RunDirectory | None,
    watchdog: Watchdog,
) -> run.Run:
    """Trains under a watchdog, while the run directory is held; an error has `run`."""
    source = batches if isinstance(batches, Source) else Source(batches, ddp.shard_batch)
    batch = source.peek()
    if not options.checks.same_batches:
        refuse_same_rows("batches", batch)
    like = ddp.steps.abstract_state(batch) if callable(state) else state
    lowered = ddp.steps.lower(batch)
    if jax.process_count() > 1:
        program = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        same = {name: f"{x.shape} {x.dtype}" for name, x in by_path(like).items()}
        agree("model, optimizer or batch", same | {"the lowered step": program})
        connect(ddp.mesh, ddp.steps.spec.placement.groups)
    if options.evaluation.params == "ema" and like.ema_params is None:
        raise ConfigError("eval_params='ema' needs ema_decay= (ddp.ema_decay), as 0.999.")

    def first() -> TrainState:
        return state(batch) if callable(state) else jax.tree.map(jax.numpy.copy, state)

    with explained(watchdog):
        loop = Loop(ddp, source, like, first, options, files, watchdog)
        try:
            try:
                beside = ThreadPoolExecutor(1)
                is_over = loop.saving.has_reached(loop.num_steps)
                if not is_over and options.checks.on_spike != "skip":  # It has another program.
                    beside.submit(lowered.compile)  # An error comes again with the first step.
                resume(loop)
                watchdog.enter("compile", loop.run.step)
                beside.shutdown()
                run_to_the_end(loop)
            except BaseException:
                _close(loop, failed=True)
                raise
            _close(loop)
        except BaseException as error:
            vars(error)["run"] = loop.run
            raise
        finally:
            loop.reporter.close()  # Checkpoints come first: the process may be killed soon.
        return loop.run


@contextlib.contextmanager
def explained(watchdog: Watchdog) -> Iterator[None]:
    """While open, a device that runs out of memory raises an error with an explanation.

    Args:
      watchdog: Watchdog, which has the phase.

    Raises:
      OutOfMemoryError: With ways to find a step that fits, and other uses of memory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not re.search("|".join(WORDS), str(error)):
            raise
        reason = str(error).partition("\n")[0][:300]
        explanation = OutOfMemoryError(
            f"out of memory in phase {watchdog.phase}: {reason}. {_OTHER_USES}"
        )
        vars(explanation).update(vars(error))  # The run, if one had begun.
        raise explanation from error


def _close(loop: Loop, *, failed: bool = False) -> None:
    """Waits for checkpoints, restores the terminal, and writes the files of other packages.

    After a failure it waits for no other process, and raises no second error. `jddp.workbench`
    makes report.html.

    Raises:
      FileSystemError: On all processes, if a checkpoint or records are lost, and there was no
        failure or signal; else it is logged.
    """
    files = loop.files
    loop.source.close()
    loop.profile.close()
    loop.reporter.progress.close()
    if not failed:
        loop.watchdog.enter("save", loop.run.step)
    is_raised = not (failed or loop.run.interrupted)
    try:
        loop.saving.close(failed=failed)
    except FileSystemError:
        is_raised = False
        raise
    finally:
        failure = None if files is None else _finish(files)
        if is_raised:
            if text := from_first("lost", str(failure or ""), timeout_seconds=SECONDS):
                raise FileSystemError(text)
        elif failure is not None:
            log.error("%s", failure)


def _finish(files: RunDirectory) -> FileSystemError | None:
    """Writes the files of other packages and the last records; returns an error if any are lost."""
    for name, make in added(RUN_ENDED) if jax.process_index() == 0 else ():
        try:
            for file, content in make(files.path, str(files.where)).items():
                files.folder.replace(file, [content])
        except Exception as error:
            log.warning("%s is not written: %r", name, error)
    return files.finish()


def _about(name: str, batches: object, most: int | None) -> dict[str, object]:
    """Facts about batches that must be equal on all processes, as far as the batches know them."""
    known = {}
    if isinstance(getattr(batches, "share", None), Share) and hasattr(batches, "settings"):
        known = batches.settings
    elif isinstance(batches, Sized):
        known = {"number of batches": min(len(batches), most or len(batches))}
    return {f"{name}: {key}": value for key, value in known.items()}
