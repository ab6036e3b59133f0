"""The training loop: resumes a run, takes its steps, evaluates and saves.

    send step t+1 ─► read the metrics of step t ─► report, evaluate, save where due

A step's metrics are read after the next step has been sent (`reporter`). So the devices never wait
for the host, and the host is never more than two steps ahead. Every decision depends on global
values, or is agreed upon, so all processes make the same decisions.
"""

import contextlib
import copy
import functools
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jddp.distributed import early
from jddp.distributed.coordination import from_first, num_processes
from jddp.distributed.forks import ending_forked_children
from jddp.distributed.requests import Requests
from jddp.distributed.watchdog import Watchdog
from jddp.engine.state import TrainState, is_float
from jddp.engine.trainable import Trainable
from jddp.errors import FileSystemError, NumericsError, ReplicaMismatchError, UsageError
from jddp.trainer.callbacks import Callback, call_each
from jddp.trainer.given import refuse_same_rows
from jddp.trainer.history import History, resume_records
from jddp.trainer.numerics import Numerics, Sent
from jddp.trainer.plan import Plan
from jddp.trainer.prefetch import Source
from jddp.trainer.replica_check import ReplicaCheck
from jddp.trainer.reporter import Clock, Reporter
from jddp.trainer.reports.metrics_file import as_json
from jddp.trainer.reports.run_directory import RunDirectory
from jddp.trainer.resume_notes import changed_rate, changed_settings, differences, length_before
from jddp.trainer.run import Run
from jddp.trainer.same_program import SameProgram
from jddp.trainer.saving import LATEST, Saving
from jddp.trainer.watching import EarlyStopping, conclusions, judge_again, settings_of, watching
from jddp.typing import Batch

log = logging.getLogger("jddp")

# After these errors the newest state must not be saved.
RUINED = (NumericsError, ReplicaMismatchError, jax.errors.JaxRuntimeError)
SECONDS = 600.0  # for process 0 to write the remaining records


class _Interrupted(Exception):
    """A signal has come, and all processes stop here."""


class Loop:
    """A run from its current position to its end.

    Args:
      ddp: A `jddp.DataParallel`, which steps and evaluates.
      source: The training batches.
      state: Initial state, unless there is a checkpoint.
      plan: Length of the run, and periods of what it does.
      files: The run directory, or None.
      callbacks: Callbacks, which get reduced values.
      about: Metadata for every checkpoint: config, versions, ...
      watchdog: Watchdog, which gets each step and phase.

    Attributes:
      run: The run in progress.
    """

    def __init__(
        self,
        ddp: Trainable,
        source: Source,
        state: TrainState,
        plan: Plan,
        files: RunDirectory | None,
        callbacks: Sequence[Callback],
        about: Mapping[str, Any],
        watchdog: Watchdog,
    ) -> None:
        self._ddp, self._source, self._plan, self._evaluation = ddp, source, plan, plan.evaluation
        self._files, self._callbacks, self._about = files, callbacks, dict(about)
        self._history = History()
        self.run = run = Run(
            ddp,
            state,
            run_dir=None if files is None else files.path,
            save=self._ask_to_save,
            evaluation=plan.evaluation,
            eval_params=plan.eval_params,
            config=copy.deepcopy(about["config"]),
            history=self._history,
        )
        run.ask_to_stop = functools.partial(self._ask, "stop")
        if not state.step.is_deleted():  # a donated state is refused by the step
            run.step = int(state.step)
        self._saving = Saving(ddp, files, plan)
        self._requests, self._watchdog = Requests(), watchdog
        self._signal: str | None = None  # at which all stop
        self._comparison = ReplicaCheck(plan.check_replicas_every_steps)
        folder = None if files is None else files.folder
        self._numerics = Numerics(ddp, source, folder, plan.max_consecutive_skips)
        self._reporter = Reporter(run, plan, files, callbacks, self._numerics, self._history)
        # The notes are on the checkpoint that the run resumes from.
        self._position, self._notes = source.position, list[str]()
        self._stopping_before = list[EarlyStopping]()  # of the run that was saved
        self._program: SameProgram | None = None  # of a run that is kept

    def resume(self) -> None:
        """Restores the newest checkpoint, if there is one, and drops the records of later steps."""
        run, files, plan = self.run, self._files, self._plan
        restored = None
        if files is not None:
            restored = self._saving.restore(run.state)
            self._program = SameProgram(self._ddp, run.state, self._source.peek(), self._about)
        if restored is not None:
            run.step, run.state, beside = restored
            try:
                self._restore_from(beside)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise FileSystemError(
                    f"{run.run_dir} holds, at step {run.step}, a run.json that this version of "
                    f"jddp cannot read: {error!r}. Choose another run.dir."
                ) from error
        else:
            self._count_steps()
        recorded = [] if files is None else resume_records(self._history, files, run.step)
        if restored is not None:
            self._notes.insert(0, f"resumed from step {run.step} of {plan.num_steps}")
            # Records may have been lost; and the checkpoint came before the evaluation of its step.
            last = recorded[-1]["step"] if recorded else -1
            run.evaluations = recorded + [x for x in run.evaluations if x["step"] > last]
            if judge_again(run, self._callbacks, self._stopping_before):
                note = "early stopping has changed: the run that it had stopped continues"
                self._notes.append(note)

    def _restore_from(self, beside: Mapping[str, Any]) -> None:
        """Restores the values that were saved beside the state."""
        run = self.run
        run.stopped = beside["stopped"]
        self._numerics.restore(beside["skipped"])
        run.metrics = dict(beside["metrics"])
        run.evaluations = [x for x in beside["evaluations"] if x["step"] <= run.step]
        self._stopping_before = [EarlyStopping(**x) for x in beside.get("early_stopping", [])]
        in_another_world = self._compare_worlds(beside["world"])  # while the first batch is there
        self._position = beside["position"]
        self._source.move_to(self._position)
        self._count_steps()
        before, now = beside.get("learning_rate"), self._reporter.learning_rate(run.step)
        keep = length_before(self._about["config"], beside.get("plan", {}))
        changes = [changed_settings(beside, self._about), changed_rate(run.step, before, now, keep)]
        if self._program is not None:
            changes.insert(0, self._program.compare(run.step, beside, self._plan.resume))
        self._notes += filter(None, [*changes, in_another_world])

    def _compare_worlds(self, before: Mapping[str, Any]) -> str | None:
        """A note on another topology than that of the checkpoint, or None."""
        if before == (world := self._ddp.steps.topology):
            return None
        draws = self._ddp.steps.planned(self._source.peek()).uses_rng
        stateful = any(map(is_float, jax.tree.leaves(self.run.state.model_state)))
        return differences(before, world, uses_rng=draws, has_statistics=stateful)

    def _count_steps(self) -> None:
        """Counts the steps of some epochs, which end with their last example."""
        plan = self._plan
        if plan.num_epochs is not None:
            plan.num_steps = self._reporter.progress.num_steps = (
                self.run.step + self._source.num_left
            )
            self._about["plan"] = plan.settings

    def run_to_the_end(self) -> None:
        """Takes steps until all are done, a callback stops the run, or a signal interrupts it."""
        run, files, num_steps = self.run, self._files, self._plan.num_steps
        self._begun_at = run.step
        if run.step > num_steps:
            self._reporter.note(f"num_steps={num_steps}: the run is at step {run.step} already")
        if self._is_over and self._is_evaluated:
            how = "finished" if run.stopped is None else f"stopped ({run.stopped})"
            self._reporter.note(f"{how} at step {run.step}; nothing to do")
            if run.evaluations:
                self._reporter.progress.evaluated(run.eval_metrics)
            self._report_best()
            return
        log_file = contextlib.nullcontext() if files is None else files.logging(jax.process_index())
        with log_file, self._requests:
            try:
                with ending_forked_children():
                    self._run_on()
            except _Interrupted:
                self._leave()
            except KeyboardInterrupt:  # the second one, to leave at once
                raise
            except BaseException as error:
                self._save_after(error)
                raise

    def _run_on(self) -> None:
        run = self.run
        if not self._notes and self._source.begins_at:
            begins = f"{self._source.begins_at:,}"
            self._reporter.note(f"batches begin at position {begins}, where their iterator was")
        for note in self._notes:
            self._reporter.note(note)
        if self._notes and self._is_due(self._plan.eval_every_steps):
            self._evaluate()  # if it was interrupted
        self._comparison.begin(0, run.state)  # as it was made or read
        self._comparison.finish()
        self._trace_evaluation()
        self._take_steps()
        if run.stopped is not None:
            self._reporter.note(f"stopped at step {run.step}: {run.stopped}")
        self._evaluate_and_save(at_end=True)
        self._report_best()
        call_each(self._callbacks, lambda callback: callback.on_end(run))
        self._act(self._requests.last())

    def _report_best(self) -> None:
        for line in conclusions(self._callbacks, self.run):
            self._reporter.note(line)

    def _leave(self) -> None:
        """Saves the state at a signal, for a later process to resume from."""
        why = self.run.interrupted = self._signal
        if self._files is None:
            self._reporter.note(f"{why}: stopped after step {self.run.step}")
        else:
            self._save_here(f"{why}: {self._saved}, from which the same call resumes")

    @property
    def _saved(self) -> str:
        return f"saved step {self.run.step} of {self._plan.num_steps}"

    def _save_here(self, note: str) -> None:
        try:
            self._act(self._requests.last())
            self._save(LATEST)
        finally:  # also where a callback raises
            self._saving.wait()
        self._reporter.note(note)

    def _save_after(self, error: BaseException) -> None:
        """Saves the state after an exception of a callback, an evaluation or the data.

        The step that was sent last is reported too, even without a run directory. An exit
        (`sys.exit`) of a callback is an exception like any other.

        Saving needs all processes of a job. If all of them fail at the same step, for example in
        the same callback or evaluation, they save together. If one fails alone, it exits at once,
        and the last checkpoint stays the newest.
        """
        is_new = self.run.step > self._begun_at and not self.run.state.step.is_deleted()
        if isinstance(error, RUINED) or not is_new:
            return
        why = type(error).__name__
        # The error that ends the run is to be raised.
        with contextlib.suppress(Exception, SystemExit):
            if self._saving.all_are_at(self.run.step):
                self._reporter.finish()
                self._comparison.finish()
                if self._files is not None:
                    rest = "fix its cause, and the same call resumes there"
                    self._save_here(f"{why}: {self._saved}; {rest}")

    def close(self, *, failed: bool = False) -> None:
        """Waits for checkpoints and restores the terminal.

        After a failure it waits for no other process, and raises no second error.
        """
        self._source.close()
        self._reporter.close()
        if not failed:
            self._watchdog.enter("save", self.run.step)
        is_raised = not (failed or self.run.interrupted)
        try:
            self._saving.close(failed=failed)
        except FileSystemError:
            is_raised = False
            raise
        finally:
            self._finish_records(is_raised=is_raised)

    def _finish_records(self, *, is_raised: bool) -> None:
        """Writes the remaining records.

        Raises:
          FileSystemError: On all processes, if records are lost and `is_raised`; else it is logged.
        """
        failure = None if self._files is None else self._files.finish()
        if not is_raised:
            if failure is not None:
                log.error("%s", failure)
        elif text := from_first("lost", str(failure or ""), timeout_seconds=SECONDS):
            raise FileSystemError(text)

    def _take_steps(self) -> None:
        run, plan = self.run, self._plan
        self._reporter.clock, first = Clock(run.step), run.step + 1
        self._source.start(plan.num_steps - run.step, first)
        self._watchdog.enter("compile", run.step)
        while not self._is_over:
            self._act(self._requests.due())
            if self._is_over or self._signal is not None:
                break
            with self._reporter.clock.waiting():
                batch = next(self._source)
            run.state, metrics = self._ddp.step(run.state, batch)
            run.step += 1
            self._comparison.finish()
            self._comparison.begin(run.step, run.state)
            self._position = self._source.position
            self._reporter.next(Sent(run.step, metrics, batch, self._position))
            if run.step == first:
                jax.block_until_ready(metrics)
                early.end()
                self._reporter.clock = Clock(run.step)  # compiled: from here on it is training time
            self._watchdog.enter("step", run.step)
            is_due = self._is_due(plan.eval_every_steps) or self._is_due(plan.save_every_steps)
            if is_due or self._numerics.in_a_row:  # which may end the run with this state
                self._reporter.next()
                self._act(self._requests.due())
            if is_due and not self._is_over:  # at the end all is due
                self._evaluate_and_save()
        self._reporter.next()
        self._act(self._requests.due())
        self._comparison.finish()
        if not self._is_over:
            raise _Interrupted

    @property
    def _is_over(self) -> bool:
        return self.run.step >= self._plan.num_steps or self.run.stopped is not None

    @property
    def _is_evaluated(self) -> bool:
        return self._evaluation is None or self.run.eval_metrics.get("step") == self.run.step

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.run.step > 0 and self.run.step % every == 0

    def _evaluate_and_save(self, *, at_end: bool = False) -> None:
        """Evaluates and saves if due; at the end, if not yet done at this step."""
        paused, run, plan = time.perf_counter(), self.run, self._plan
        if self._files is not None and (at_end or self._is_due(plan.save_every_steps)):
            self._save(LATEST)
            if at_end or not run.evaluations:  # so that mistakes in evaluation show
                self._saving.settle()
        if at_end or self._is_due(plan.eval_every_steps):
            self._evaluate()
        if at_end and self._files is not None and run.stopped is not None:
            self._save(LATEST)  # An evaluation may have stopped the run; a checkpoint records this.
        self._watchdog.enter("step", run.step)
        self._reporter.clock.pause(time.perf_counter() - paused)

    def _trace_evaluation(self) -> None:
        """Traces an evaluation of the first batch, so that mistakes show before the first step."""
        if self._evaluation is None:
            return
        batches = iter(self._evaluation)
        if not (first := list(itertools.islice(batches, 1))):
            raise UsageError("evaluate= holds no batches. Was its iterator already used up?")
        if batches is self._evaluation:  # an iterator, which can be read only once
            self._evaluation = itertools.chain(first, batches)
        refuse_same_rows("evaluate", first[0], self._plan)
        names = self._ddp.trace_evaluation(self.run.state, first[0], self._plan.eval_params)
        for callback in watching(self._callbacks):
            callback.check(names)

    def _evaluate(self) -> None:
        if not self._is_evaluated:
            batches, params = self._batches_until_stopped(), self._plan.eval_params
            self._reporter.evaluated(self._ddp.evaluate(self.run.state, batches, params))
            self._act(self._requests.due())

    def _batches_until_stopped(self) -> Iterator[Batch]:
        for batch in self._evaluation or ():
            self._watchdog.enter("evaluation", self.run.step)
            self._act(self._requests.due())
            if self._signal is not None:
                raise _Interrupted
            yield batch

    def _ask_to_save(self, where: str) -> None:
        self._saving.require_directory()
        self._ask("save", where)

    def _ask(self, what: str, value: str) -> None:
        """Requests a stop or save of all processes at a common step; one alone acts at once."""
        if num_processes() > 1 and self._requests.is_open:
            self._requests.ask(f"{what} {value}")
        else:
            self._act([f"{what} {value}"])

    def _act(self, requests: Sequence[str]) -> None:
        run, phase = self.run, self._watchdog.phase
        for what, _, value in (request.partition(" ") for request in requests):
            if what == "save":
                self._save(value)
                self._watchdog.enter(phase, run.step)
            elif what == "stop":
                run.stopped = run.stopped or value
            else:
                self._signal = self._signal or value

    def _save(self, where: str) -> None:
        run = self.run
        self._watchdog.enter("save", run.step)
        beside = {
            "position": self._position,
            "metrics": as_json(run.metrics),
            "evaluations": as_json(run.evaluations[-1:]),  # those before are in the file of metrics
            "stopped": run.stopped,
            "early_stopping": settings_of(self._callbacks),
            "skipped": self._numerics.kept,
            "world": self._ddp.steps.topology,
            "learning_rate": self._reporter.learning_rate(run.step),
            "program": None if self._program is None else self._program.kept,
            **self._about,
        }
        self._saving.save(where, run.step, run.state, beside)
        call_each(self._callbacks, lambda callback: callback.on_save(run))
