"""The training loop: takes the steps of a run, evaluates and saves.

    send step t+1 ─► read the metrics of step t ─► report, evaluate, save where due

A step's metrics are read after the next step has been sent (`reporter`). So the devices never wait
for the host, and the host is never more than two steps ahead. Every decision depends on global
values, or is agreed upon, so all processes make the same decisions.

A run begins in `resume`. `run_to_the_end` saves it, whatever ends it.
"""

import contextlib
import copy
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jax

from jddp.data.periods import Reached
from jddp.distributed.coordination import gather, num_processes
from jddp.distributed.exits import process
from jddp.distributed.requests import Request, Requests
from jddp.distributed.watchdog import Watchdog
from jddp.engine.compiled import Trainable
from jddp.engine.state import TrainState
from jddp.ground.errors import FileSystemError, NumericsError, ReplicaMismatchError, UsageError
from jddp.ground.typing import Batch
from jddp.trainer.numerics import Numerics, ReplicaCheck, Sent
from jddp.trainer.prefetch import Source, refuse_same_rows
from jddp.trainer.reporter import Clock, Reporter, measure
from jddp.trainer.reports.files import say
from jddp.trainer.reports.run_directory import RunDirectory
from jddp.trainer.run import Every, Options, Progress, Run, as_period, call_each
from jddp.trainer.saving import LATEST, Saving
from jddp.trainer.watching import best_steps, watching

STEP, DATA = "jddp step", "jddp data"  # names of the annotations in a run's traces
# After these errors the newest state must not be saved.
RUINED = (NumericsError, ReplicaMismatchError, jax.errors.JaxRuntimeError)
TOGETHER_SECONDS = 2.0  # Time within which all processes fail if they make the same mistake.
log = logging.getLogger("jddp")


class Profile:
    """Records a trace from before the first of some steps until after the last.

    Args:
      steps: Numbers of the first and last step, from 1; None records nothing.
      folder: Folder for the trace of this process.
    """

    def __init__(self, steps: Sequence[int] | None, folder: Path | None) -> None:
        self._first, self._last = steps or (-1, -1)
        self._folder = folder
        self._is_open = False

    @contextlib.contextmanager
    def step(self, number: int, state: TrainState) -> Iterator[None]:
        """While open, a step is sent; the trace begins and ends between steps.

        Args:
          number: Number of the step.
          state: State before it.
        """
        if number in (self._first, self._last + 1):
            jax.block_until_ready(state)
        if number == self._first:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # Traced Python calls slow the host and fill the file.
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
            self._is_open = True
        elif number > self._last:
            self.close()
        with jax.profiler.StepTraceAnnotation(STEP, step_num=number):
            yield

    def close(self) -> None:
        """Ends the trace, if one is recorded."""
        if self._is_open:
            self._is_open = False
            jax.profiler.stop_trace()


class Interrupted(Exception):
    """A signal has come, and all processes stop here."""


class Loop:
    """A run from its current position to its end.

    Args:
      ddp: A `jddp.DataParallel`, which steps and evaluates.
      source: The training batches.
      like: The state to start from, or its shapes and shardings.
      first: Function that makes this state, unless there is a checkpoint.
      options: Length of the run, and periods of its actions.
      files: The run directory, or None.
      watchdog: Watchdog, which gets each step and phase.

    Attributes:
      run: The run in progress, with its `Progress`.
      notes: Notes on the checkpoint from which the run resumes.
      signal: Name of the signal at which all processes stop, or None.
    """

    def __init__(
        self,
        ddp: Trainable,
        source: Source,
        like: TrainState,
        first: Callable[[], TrainState],
        options: Options,
        files: RunDirectory | None,
        watchdog: Watchdog,
    ) -> None:
        self.ddp, self.source, self.first, self.options = ddp, source, first, options
        self.files, self.watchdog = files, watchdog
        self._evaluation = options.evaluation.batches
        self.run = Run(
            ddp,
            like,
            run_dir=None if files is None else files.path,
            evaluation=self._evaluation,
            eval_params=options.evaluation.params,
            config=copy.deepcopy(options.config),
        )
        self.run.ask = self._ask
        step = int(like.step) if isinstance(like.step, jax.Array) else 0
        self.run.progress = Progress(
            step,
            source.position,
            before=source.reached(step, source.position),
            world=ddp.steps.topology,
            config=options.config,
            manifest=options.manifest,
        )
        self.saving = Saving(ddp, files, options)
        folder = None if files is None else files.folder
        self.numerics = Numerics(ddp, source, folder, options.checks)
        self.replica_check = ReplicaCheck(options.checks.replicas_every_steps)
        profiles = None if files is None else files.profile(jax.process_index())
        self.profile = Profile(options.profile_steps, profiles)
        self.reporter = Reporter(self.run, options, files, self.numerics, source)
        self.run.give = self.reporter.give
        self.run.show = self.reporter.note
        self.requests = Requests()
        self.signal: str | None = None
        self._made_at = time.monotonic()
        self.notes = list[str]()
        limited = getattr(self._evaluation, "limited", None)
        if limited and options.evaluation.limit is not None:
            self._evaluation = limited(options.evaluation.limit, options.seed)

    @property
    def is_over(self) -> bool:
        """Whether no step is left to take."""
        return self.run.step >= self.num_steps or self.run.stopped is not None

    @property
    def reached(self) -> Reached:
        """How far the run has come, with its last step."""
        return self.source.reached(self.run.step, self.run.progress.position)

    @property
    def is_evaluated(self) -> bool:
        """Whether there is no evaluation to do of this step."""
        return self._evaluation is None or self.run.eval_metrics.get("step") == self.run.step

    @property
    def num_steps(self) -> int:
        """Total number of steps."""
        return self.options.num_steps or 0  # `start` has counted the steps of epochs.

    def begin(self) -> None:
        """Prints the notes, checks replicas and evaluation, and starts to read batches."""
        run = self.run
        self.reporter.begin()
        facts = {"step": run.step, "restore_seconds": time.monotonic() - self._made_at}
        facts["start_seconds"] = self._made_at - (process.forked_at or self._made_at)
        self.saving.report_memory()
        for number, note in enumerate(self.notes):
            self.reporter.note(note, "" if number else "resumed", **facts)
        self.reporter.reached = self.reached
        call_each(self.options.callbacks, lambda callback: callback.on_begin(run))
        if self.notes and self._is_due(self.options.eval_every_steps):
            self._evaluate()  # The run may have ended before this evaluation.
        self.replica_check.begin(0, run.state)  # The state as it was made or read.
        self.replica_check.finish()
        self._check_evaluation()
        self.source.start(self.num_steps - run.step)

    def end(self) -> None:
        """Evaluates and saves the last state, and reports the run."""
        run = self.run
        if run.stopped is not None:
            note = f"stopped at step {run.step}: {run.stopped}"
            self.reporter.note(note, "stopped", step=run.step)
        self._evaluate_and_save(at_end=True)
        self.reporter.report_best()
        self.reporter.report_throughput()
        call_each(self.options.callbacks, lambda callback: callback.on_end(run))
        self.act(self.requests.last())

    def take_steps(self) -> None:
        """Takes steps until all are done or a callback has stopped the run.

        Raises:
          Interrupted: At a signal, before the end.
        """
        run = self.run
        first = run.step + 1
        self.reporter.clock = Clock(run.step)
        self.watchdog.enter("compile", run.step)
        while not self.is_over:
            self.act(self.requests.due())
            if self.is_over or self.signal is not None:
                break
            with jax.profiler.TraceAnnotation(DATA), self.reporter.clock.measure("data"):
                batch = next(self.source)
            options = self.numerics.options(run.progress)
            if "make" in options:
                self.watchdog.enter("compile", run.step)  # A replay compiles at its first step.
            with self.profile.step(run.step + 1, run.state), self.reporter.clock.measure("devices"):
                run.state, metrics = self.ddp.step(run.state, batch, **options)
            position = self.source.position
            run.progress = replace(
                run.progress, step=run.step + 1, before=self.reached, position=position
            )
            with self.reporter.clock.measure("devices"):
                self.replica_check.finish()
            self.replica_check.begin(run.step, run.state)
            self.reporter.next(Sent(run.step, metrics, batch, position))
            if run.step == first:
                jax.block_until_ready(metrics)
                say(f"first step of this start: {first}", "first step", step=first)
                process.is_early = False  # From here on there is a step to save.
                self.reporter.measured(measure(self.ddp, batch))
            self.watchdog.enter("step", run.step)
            is_due = self._is_due(self.options.eval_every_steps, self.options.save_every_steps)
            if is_due or run.progress.skipped.in_a_row:  # Skips may end the run with this state.
                self.reporter.next()
                self.act(self.requests.due())
            if is_due and not self.is_over:  # At the end `end` does both.
                with self.reporter.clock.measure("pause"):
                    self._evaluate_and_save()
            for request in self.saving.due(run.step):
                self._ask(request)
        self.reporter.next()
        self.profile.close()
        self.act(self.requests.due())
        self.replica_check.finish()
        if not self.is_over:
            raise Interrupted

    def _is_due(self, *periods: Every) -> bool:
        """Whether one of the periods has ended with the last step."""
        before, now = self.run.progress.before, self.reached
        return any(x.ended(before, now) for x in map(as_period, periods) if x is not None)

    def _evaluate_and_save(self, *, at_end: bool = False) -> None:
        """Evaluates and saves if due; at the end, if not yet done at this step."""
        run = self.run
        if self.files is not None and (at_end or self._is_due(self.options.save_every_steps)):
            self.save(LATEST)
            if at_end or not run.evaluations:  # The first evaluation may fail: save before it.
                with contextlib.suppress(FileSystemError):  # It is logged; `close` raises it.
                    self.saving.wait()
        if at_end or self._is_due(self.options.eval_every_steps):
            self._evaluate()
        if at_end and self.files is not None and run.stopped is not None:
            self.save(LATEST)  # An evaluation may have stopped the run; a checkpoint records this.
        self.watchdog.enter("step", run.step)

    def _check_evaluation(self) -> None:
        """Traces an evaluation of the first batch, so that mistakes show before the first step.

        In a new run the evaluation of this batch is run, too; its result is dropped.
        """
        if self._evaluation is None:
            return
        batches = iter(self._evaluation)
        if not (first := list(itertools.islice(batches, 1))):
            raise UsageError("evaluate= holds no batches. Was its iterator already used up?")
        if batches is self._evaluation:  # An iterator can be read only once.
            self._evaluation = itertools.chain(first, batches)
        if not self.options.checks.same_batches:
            refuse_same_rows("evaluate", first[0])
        names = self.ddp.trace_evaluation(self.run.state, first[0], self.options.evaluation.params)
        for callback in watching(self.options.callbacks):
            callback.check(names)
        if self.run.step == 0:
            self.watchdog.enter("evaluation", 0)
            self.ddp.evaluate(self.run.state, first, self.options.evaluation.params)

    def _evaluate(self) -> None:
        if not self.is_evaluated:
            batches = self._batches_until_stopped()
            with self.reporter.clock.measure("devices"):
                found = self.ddp.evaluate(self.run.state, batches, self.options.evaluation.params)
            self.reporter.evaluated(found)
            self.act(self.requests.due())

    def _batches_until_stopped(self) -> Iterator[Batch]:
        for batch in itertools.islice(self._evaluation or (), self.options.evaluation.limit):
            self.watchdog.enter("evaluation", self.run.step)
            self.act(self.requests.due())
            if self.signal is not None:
                raise Interrupted
            yield batch

    def _ask(self, request: Request) -> None:
        """Requests a stop or save of all processes at a common step; one alone acts at once."""
        if request.kind == "save":
            self.saving.require_directory()
        if num_processes() > 1 and self.requests.is_open:
            self.requests.ask(request)
        else:
            self.act([request])

    def act(self, requests: Sequence[Request]) -> None:
        """Carries out the requests of all processes; a signal is only kept."""
        run = self.run
        phase = self.watchdog.phase
        for kind, value in requests:
            if kind == "save":
                self.save(value)
                self.watchdog.enter(phase, run.step)
            elif kind == "memory":
                self.reporter.next()  # A restart reads no record of an earlier step again.
                self.saving.keep_in_memory(run.state, self._progress_to_save())
            elif kind == "stop":
                run.progress = replace(run.progress, stopped=run.stopped or value)
            else:
                self.signal = self.signal or value

    def save(self, where: str) -> None:
        """Saves the newest state and all that a run resumes from, into a folder of the run."""
        run, callbacks = self.run, self.options.callbacks
        self.watchdog.enter("save", run.step)
        self.saving.save(where, run.state, self._progress_to_save())
        call_each(callbacks, lambda callback: callback.on_save(run))

    def _progress_to_save(self) -> Progress:
        run = self.run
        best = best_steps(run, self.options.callbacks)
        run.progress = replace(run.progress, best=best, plan=self.options.settings)
        # The evaluations before the last one are in the file of metrics.
        return replace(run.progress, evaluations=run.evaluations[-1:])


def run_to_the_end(loop: Loop) -> None:
    """Takes steps until all are done, a callback stops the run, or a signal interrupts it."""
    run, reporter = loop.run, loop.reporter
    begun_at, num_steps = run.step, loop.num_steps
    if loop.is_over and loop.is_evaluated:
        how = "finished" if run.stopped is None else f"stopped ({run.stopped})"
        reporter.note(f"{how} at step {run.step}; nothing to do")
        if run.evaluations:
            reporter.progress.log(run.eval_metrics)
        reporter.report_best()
        return
    files = loop.files
    log_file = contextlib.nullcontext() if files is None else files.logging(jax.process_index())
    with log_file, loop.requests:
        try:
            loop.begin()
            loop.take_steps()
            loop.end()
        except Interrupted:
            run.interrupted = loop.signal
            note = f"{loop.signal}: stopped after step {run.step}"
            if files is not None:
                _save_here(loop)
                saved = f"saved step {run.step} of {num_steps}"
                note = f"{loop.signal}: {saved}, from which the same call resumes"
            reporter.note(note, "signal", step=run.step)
        except KeyboardInterrupt:  # The second Ctrl-C leaves at once.
            raise
        except BaseException as error:
            if run.step > begun_at and not isinstance(error, RUINED):
                _save_after(loop, error)
            try:
                call_each(loop.options.callbacks, lambda each: each.on_exception(run, error))
            except (Exception, SystemExit) as later:  # The first error is the one to raise.
                log.error("A callback has failed in on_exception: %r", later, exc_info=later)
            raise


def _save_after(loop: Loop, error: BaseException) -> None:
    """Saves the state after an exception of a callback, an evaluation or the data.

    The step that was sent last is reported too, even without a run directory. An exit
    (`sys.exit`) of a callback is an exception like any other.

    Saving needs all processes of a job. If all of them fail at the same step, for example in the
    same callback or evaluation, they save together. If one fails alone, it exits at once, and the
    last checkpoint stays the newest.
    """
    if loop.run.state.step.is_deleted():
        return
    # The caller raises the error that ends the run.
    with contextlib.suppress(Exception, SystemExit):
        key = f"saved at an error/{loop.run.step}"
        gather(key, "", timeout_seconds=TOGETHER_SECONDS)  # Raises if a process is missing.
        try:  # Records, callbacks and the checkpoint must end with the same step.
            loop.reporter.next()
        except RUINED:
            raise
        except (Exception, SystemExit) as later:
            log.error("A callback has failed again: %r", later)
        loop.replica_check.finish()
        if loop.files is not None:
            _save_here(loop)
            saved = f"saved step {loop.run.step} of {loop.num_steps}"
            how = "fix the cause, and the same call resumes from it"
            loop.reporter.note(f"{type(error).__name__}: {saved}; {how}", step=loop.run.step)


def _save_here(loop: Loop) -> None:
    try:
        loop.act(loop.requests.last())
        loop.save(LATEST)
    finally:  # A callback may have raised.
        loop.saving.wait()
