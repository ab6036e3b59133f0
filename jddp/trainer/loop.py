"""One run of the loop.

    send step t+1 ─► read the metrics of step t ─► report, evaluate, save where due

A step's metrics are read after the next step has been sent, so the devices never wait for the
host, and the host is never more than two steps ahead. Every decision is taken from global values,
so all processes take it alike.
"""

import contextlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jddp.config.format_1 import renamed_run
from jddp.distributed.coordination import from_first
from jddp.distributed.stopping import StopSignals
from jddp.distributed.watchdog import Watchdog
from jddp.engine.state import TrainState, is_float
from jddp.errors import FileSystemError, NumericsError, ReplicaMismatchError, UsageError
from jddp.trainer.callbacks import Callback
from jddp.trainer.clock import Clock
from jddp.trainer.numerics import Numerics, Sent
from jddp.trainer.plan import Plan
from jddp.trainer.prefetch import Source
from jddp.trainer.replica_check import Comparison
from jddp.trainer.reports import Progress, RunDirectory
from jddp.trainer.resume_notes import changed_rate, changed_settings, differences
from jddp.trainer.run import Run
from jddp.trainer.saving import Saving
from jddp.typing import Batch, Batches

# After these the newest state is not one to resume from.
RUINED = (NumericsError, ReplicaMismatchError, jax.errors.JaxRuntimeError)
SECONDS = 60.0  # for which process 0 may read what was evaluated


class _Interrupted(Exception):
    """All processes stop here, at a signal."""


class Loop:
    """A run from where it stands to its end.

    Args:
      ddp: What steps and evaluates.
      source: The training batches.
      state: To start from, unless a checkpoint is found.
      plan: What to do when.
      files: The run directory, or None.
      callbacks: Called with reduced values.
      about: What goes into every checkpoint: config, versions, ...
      watchdog: Told of each step and phase.

    Attributes:
      run: The run, as far as it is.
    """

    def __init__(
        self,
        ddp: Any,
        source: Source,
        state: TrainState,
        plan: Plan,
        files: RunDirectory | None,
        callbacks: Sequence[Callback],
        about: Mapping[str, Any],
        watchdog: Watchdog,
    ) -> None:
        self._ddp, self._source, self._plan = ddp, source, plan
        self._evaluation = plan.evaluation
        self._files, self._callbacks, self._about = files, callbacks, about
        self._saving = Saving(ddp, files, plan, about)
        self.run = self._run = Run(
            ddp,
            state,
            run_dir=None if files is None else files.path,
            save=self._save,
            evaluation=plan.evaluation,
            eval_params=plan.eval_params,
        )
        if not state.step.is_deleted():  # a state that was taken is refused by the step, in words
            self._run.step = int(state.step)
        self._progress = Progress(plan.num_steps, is_writer=jax.process_index() == 0)
        self._signals, self._watchdog = StopSignals(), watchdog
        self._comparison = Comparison(plan.check_replicas_every_steps)
        evidence = None if files is None else files.path / "nonfinite"
        self._numerics = Numerics(ddp, source, evidence, plan.max_consecutive_skips)
        self._position: Any = source.position()
        self._resumed_from: int | None = None
        self._moved: list[str | None] = []
        self._begun_at = self._run.step
        self._waiting: Sent | None = None  # the newest step, whose metrics were not yet read
        self._clock = Clock(0)

    def resume(self) -> None:
        """Restores the newest checkpoint, if there is one, and drops the records behind it."""
        run = self._run
        if self._files is None:
            return
        restored = self._saving.restore(run.state)
        if restored is not None:
            run.step, run.state, beside = restored
            try:
                self._go_on_from(beside)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise FileSystemError(
                    f"{run.run_dir} holds, at step {run.step}, a run.json of another version of "
                    f"jddp, or of something else: {error!r}. Choose another run.dir."
                ) from error
            self._resumed_from = run.step
        self._files.metrics.truncate_after(run.step)
        run.history = [x for x in self._files.metrics.read() if x["step"] <= run.step]
        if restored is not None:
            self._take_up_evaluation()
        self._begun_at = run.step

    def _go_on_from(self, beside: Mapping[str, Any]) -> None:
        """Takes up what was saved beside the state."""
        run, beside = self._run, renamed_run(beside)
        run.stopped = beside["stopped"]
        self._numerics.skipped, self._numerics.in_a_row = map(int, beside["skipped"])
        run.metrics, run.evaluations = beside["metrics"], beside["evaluations"]
        self._moved = [
            changed_settings(beside, self._about),
            changed_rate(run.step, beside.get("learning_rate"), self._rate_of(run.step)),
        ]
        if beside["world"] != (world := self._ddp.world):
            moved = differences(
                beside["world"],
                world,
                draws=self._ddp.draws(self._source.peek()),
                has_statistics=any(map(is_float, jax.tree.leaves(run.state.model_state))),
            )
            self._moved.append(moved)
        self._position = beside["position"]
        self._source.move_to(self._position)

    def _take_up_evaluation(self) -> None:
        """Takes the evaluation of the step that was restored, which came after it was saved."""
        run = self._run
        found = [x for x in run.history if x.get("split") == "eval" and x["step"] == run.step]
        told = from_first("evaluated", json.dumps(found[-1:]), timeout_seconds=SECONDS)
        run.evaluations += [] if self._is_evaluated else json.loads(told)

    def run_to_the_end(self) -> Run:
        """Steps until all are done, a callback has stopped the run or a signal interrupts it."""
        run, num_steps = self._run, self._plan.num_steps
        if run.step > num_steps:
            self._progress.note(
                f"num_steps={num_steps}: the run is at step {run.step} already, so no step is taken"
            )
        if self._is_over and self._is_evaluated:
            self._progress.note(f"finished at step {run.step}; nothing to do")
            return run
        files = self._files
        with (
            contextlib.nullcontext() if files is None else files.logging(jax.process_index()),
            self._signals,
        ):
            try:
                self._run_on()
            except _Interrupted:
                self._leave()
            except Exception as error:
                self._save_after(error)
                raise
        return run

    def _run_on(self) -> None:
        run = self._run
        if self._resumed_from is not None:
            self._progress.note(f"resumed from step {run.step} of {self._plan.num_steps}")
            if self._is_due(self._plan.eval_every_steps):
                self._evaluate()  # if it was interrupted
        for told in filter(None, self._moved):
            self._progress.note(told)
        self._comparison.begin(0, run.state)  # as it was made or read
        self._comparison.finish()
        self._trace_evaluation()
        self._take_steps()
        if run.stopped is not None:
            self._progress.note(f"stopped at step {run.step}: {run.stopped}")
        self._evaluate_and_save(at_end=True)
        for callback in self._callbacks:
            callback.on_end(run)

    def _leave(self) -> None:
        """Saves what there is, for another process to go on from."""
        run = self._run
        run.interrupted = self._signals.name
        if self._files is None:
            self._progress.note(f"{run.interrupted}: stopped after step {run.step}")
            return
        self._save_here(run.interrupted)

    def _save_here(self, why: str | None) -> None:
        step, num_steps = self._run.step, self._plan.num_steps
        try:
            self._run.save()
        finally:  # also where a callback fails of it
            self._saving.wait()
        self._progress.note(
            f"{why}: saved step {step} of {num_steps}, from which the same call goes on"
        )

    def _save_after(self, error: Exception) -> None:
        """Saves the state that a failing callback, evaluation or data set has left as it was.

        Saving needs all processes of a job. Where all of them fail at the same step, as in a
        callback or an evaluation of the same code, they save together; where one fails alone it
        leaves at once, and the last checkpoint stays the newest.
        """
        run = self._run
        is_new = run.step > self._begun_at and not run.state.step.is_deleted()
        if self._files is None or isinstance(error, RUINED) or not is_new:
            return
        with contextlib.suppress(Exception):  # The error that ends the run is to be raised.
            if self._saving.all_are_at(run.step):
                if self._waiting is not None:
                    self._record(self._waiting)
                self._comparison.finish()
                self._save_here(type(error).__name__)

    def close(self) -> None:
        """Waits for checkpoints, and leaves the terminal as it was."""
        self._watchdog.enter("save", self._run.step)
        self._source.close()
        self._progress.close()
        self._saving.close()

    def abandon(self) -> None:
        """The same where something has failed, which is to be told rather than what comes of it."""
        self._source.close()
        self._progress.close()
        self._saving.abandon()

    def _take_steps(self) -> None:
        run, plan = self._run, self._plan
        self._clock, first = Clock(run.step), run.step + 1
        self._source.start(plan.num_steps - run.step, first)
        self._watchdog.enter("compile", run.step)
        while not self._is_over:
            if self._signals.agreed():
                break
            with self._clock.waiting():
                batch = next(self._source)
            run.state, metrics = self._ddp.step(run.state, batch)
            run.step += 1
            self._comparison.finish()
            self._comparison.begin(run.step, run.state)
            self._position = self._source.position()
            self._report_waiting(Sent(run.step, metrics, batch, self._position))
            if run.step == first:
                jax.block_until_ready(metrics)
                self._clock = Clock(run.step)  # compiled: from here on time is training time
            self._watchdog.enter("step", run.step)
            is_due = self._is_due(plan.eval_every_steps) or self._is_due(plan.save_every_steps)
            if is_due or self._numerics.in_a_row:  # which is to end with the state at hand
                self._report_waiting()
            if is_due and not self._is_over:  # at the end all is due
                self._evaluate_and_save()
        self._report_waiting()
        self._comparison.finish()
        if not self._is_over:
            raise _Interrupted

    @property
    def _is_over(self) -> bool:
        return self._run.step >= self._plan.num_steps or self._run.stopped is not None

    @property
    def _is_evaluated(self) -> bool:
        no_need = self._evaluation is None
        return no_need or self._run.eval_metrics.get("step") == self._run.step

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self._run.step % every == 0

    def _report_waiting(self, sent: Sent | None = None) -> None:
        """Reports the step before, whose successor is on its way and waits in its place."""
        late, self._waiting = self._waiting, sent
        if late is None:
            return
        values = self._record(late)
        for callback in self._callbacks:
            callback.on_step(self._run, {"step": late.step, **values})

    def _record(self, sent: Sent) -> dict[str, float]:
        """Waits for a step, and records its metrics where that is due; returns them if read."""
        step = sent.step
        if self._numerics.look(sent, self._run.state):  # at each: none behind it may be saved
            self._progress.note(
                f"step {step} is skipped: its loss, gradients or other state are not finite"
            )
        is_logged = step % self._plan.log_every_steps == 0 or step == self._plan.num_steps
        if not (is_logged or self._callbacks):
            return {}
        values = {name: float(x) for name, x in jax.device_get(dict(sent.metrics)).items()}
        if is_logged:
            self._log(step, values, sent.num_rows)
        return values

    def _log(self, step: int, values: dict[str, float], rows: int) -> None:
        record: dict[str, Any] = {"step": step, "split": "train", **values}
        if self._plan.learning_rate is not None:
            record["learning_rate"] = self._rate_of(step)
        if seconds := self._clock.seconds_per_step(step):
            record |= {**seconds, "examples_per_second": rows / seconds["step_seconds"]}
        self._run.metrics = record
        self._run.history.append(record)
        if self._files is not None:
            self._files.metrics.append(record)
        self._progress.log(record)

    def _rate_of(self, step: int) -> float | None:
        """The learning rate of a step, numbered from 1; None where there is none or no schedule."""
        schedule = self._plan.learning_rate
        return None if schedule is None or step < 1 else float(np.asarray(schedule(step - 1)))

    def _evaluate_and_save(self, *, at_end: bool = False) -> None:
        """Does what is due at this step; at the end, what has not been done at this step."""
        paused, run, plan = time.perf_counter(), self._run, self._plan
        if self._files is not None and (at_end or self._is_due(plan.save_every_steps)):
            run.save()
            if at_end or not run.evaluations:  # where a mistake in evaluation would show
                self._saving.settle()
        if at_end or self._is_due(plan.eval_every_steps):
            self._evaluate()
        if at_end and self._files is not None and run.stopped is not None:
            run.save()  # An evaluation may have stopped it, which is to be known.
        self._watchdog.enter("step", run.step)
        self._clock.pause(time.perf_counter() - paused)

    def _trace_evaluation(self) -> None:
        """Traces an evaluation of the first batch: a mistake shows before the first step."""
        if self._evaluation is None:
            return
        batches = iter(self._evaluation)
        first = list(itertools.islice(batches, 1))
        if not first:
            raise UsageError("evaluate= holds no batches. Was the iterator used up before?")
        if batches is self._evaluation:  # which can be read but once
            self._evaluation = itertools.chain(first, batches)
        self._ddp.trace_evaluation(self._run.state, first[0], self._plan.eval_params)

    def _evaluate(self) -> None:
        run, plan = self._run, self._plan
        if self._evaluation is None or self._is_evaluated:
            return
        batches = self._until_stopped(self._evaluation)
        metrics = self._ddp.evaluate(run.state, batches, plan.eval_params)
        record: dict[str, Any] = {"step": run.step, "split": "eval", **metrics}
        run.evaluations.append(record)
        run.history.append(record)
        self._progress.evaluated(record)
        try:
            for callback in self._callbacks:
                callback.on_eval(run, record)
        finally:  # A run that is killed before this evaluates, and calls them, again.
            if self._files is not None:
                self._files.metrics.append(record)

    def _until_stopped(self, batches: Batches) -> Iterator[Batch]:
        for batch in batches:
            self._watchdog.enter("evaluation", self._run.step)
            if self._signals.agreed():
                raise _Interrupted
            yield batch

    def _save(self, where: str) -> None:
        run = self._run
        self._watchdog.enter("save", run.step)
        beside = {
            "position": self._position,
            "metrics": run.metrics,
            "evaluations": run.evaluations,
            "stopped": run.stopped,
            "skipped": [self._numerics.skipped, self._numerics.in_a_row],
            "world": self._ddp.world,
            "learning_rate": self._rate_of(run.step),
        }
        self._saving.save(where, run.step, run.state, beside)
        for callback in self._callbacks:
            callback.on_save(run)
