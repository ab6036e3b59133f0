"""Reads the metrics of each step after the next step was sent, and reports them.

A step's metrics are read late, so that the devices never wait for the host. They go to the check
for NaN and infinity, to the callbacks and, if due, as a record to the sinks: the terminal and the
metrics file, and those that the user has chosen.
"""

import copy
import dataclasses
import logging
import operator
from collections.abc import Mapping

import jax
import numpy as np

from jddp.data.periods import Epochs, Reached
from jddp.inspection.layers import Layers
from jddp.modules.rows import count_rows
from jddp.trainer.numerics import Numerics, Sent
from jddp.trainer.options import Options
from jddp.trainer.prefetch import Source
from jddp.trainer.reports.display import Display
from jddp.trainer.reports.lines import EXPOSED_SHARE, Course, Pause, summary
from jddp.trainer.reports.run_directory import RunDirectory
from jddp.trainer.reports.sinks import GuardedSink, Sink, Start
from jddp.trainer.run import Callback, Run, call_each
from jddp.trainer.throughput import Work
from jddp.trainer.timing import Clock, Processes, Profile
from jddp.trainer.watching import Watching, watching
from jddp.typing import JsonObject, Record

log = logging.getLogger("jddp")

EPOCH = Epochs(1)


@dataclasses.dataclass(eq=False)
class Reporter:
    """Reports the steps and evaluations of a run.

    Args:
      run: The run.
      options: Periods of reports.
      files: The run directory, or None.
      numerics: Check of each step.
      profile: Trace of some steps.
      source: The training batches, which know their epochs.

    Attributes:
      reached: How far the run had come with the last step that was reported.
      clock: Time of steps since the last record.
      work: The work of a step, for its rates.
      course: Facts of the run for its progress.
      evaluations: Evaluations of the run, whose time is measured.
      saves: Checkpoints of the run, too.
      progress: Sink that prints, or shows in a notebook, also sentences.
      processes: Comparison of the processes of the job.
      note: Function that prints a sentence.
    """

    run: Run
    options: Options
    files: RunDirectory | None
    numerics: Numerics
    profile: Profile
    source: Source

    def __post_init__(self) -> None:
        """Begins the display of progress."""
        is_writer = jax.process_index() == 0
        options, steps_per_epoch = self.options, self.source.steps_per_epoch
        self._log_every = options.log_every
        self.evaluations = Pause.at_ends_of(options.eval_every, steps_per_epoch)
        self.saves = Pause.at_ends_of(options.save_every, steps_per_epoch)
        pauses = (self.evaluations, self.saves)
        self.course = Course(options.num_steps or 0, steps_per_epoch=steps_per_epoch, pauses=pauses)
        self.reached = Reached(self.run.step)
        self.progress = Display(self.course, is_writer=is_writer)
        self.note = self.progress.note
        chosen = self.options.sinks if is_writer else ()
        self._guarded = [GuardedSink(sink.name, sink.make) for sink in chosen]
        file = [] if self.files is None else [self.files.metrics]
        self._kept: list[Sink] = [*file, *self._guarded]  # which the terminal does not
        self.clock = Clock(0)
        self.work = Work((), 0, {})
        self.processes = Processes(self.note)
        self._waiting: Sent | None = None  # the newest step, whose metrics are not read yet

    def begin(self) -> None:
        """Makes the sinks that the user has chosen, once the run is where it begins or resumes."""
        self.course.best = self._best()
        for sink in self._guarded:
            sink.begin(Start(self.run.run_dir, self.run.config or {}, self.run.step))

    def close(self) -> None:
        """Closes the sinks that the user has chosen, for which it may wait."""
        for sink in self._guarded:
            sink.close()

    def measured(self, work: Work) -> None:
        """Takes the work of a step, after the first one, which is compiled: time begins here."""
        self.work = work
        self.course.unit = work.unit
        self.processes.begin(work.devices)
        self.clock = Clock(self.run.step)

    def next(self, sent: Sent | None = None) -> None:
        """Reports the pending step; `sent`, if given, becomes the pending step."""
        late, self._waiting = self._waiting, sent
        if late is not None:
            self._call(late, self._record(late))

    def finish(self) -> None:
        """Reports the pending step after a failure; a callback that fails again is logged.

        So records, callbacks and the last checkpoint end with the same step.

        Raises:
          NumericsError: If that step must not be saved.
        """
        late, self._waiting = self._waiting, None
        if late is None:
            return
        values = self._record(late)
        try:
            self._call(late, values)
        except (Exception, SystemExit) as error:
            log.error("A callback has failed again, at step %d: %r", late.step, error)

    def _call(self, sent: Sent, values: Mapping[str, float]) -> None:
        def on_step(callback: Callback) -> None:
            callback.on_step(self.run, {"step": sent.step, **values})

        # Before callbacks: the step is counted, also if one of them fails.
        before, self.reached = self.reached, self._reached_by(sent)
        call_each(self.options.callbacks, on_step)
        for number in EPOCH.ended(before, self.reached):
            on_epoch = operator.methodcaller("on_epoch", self.run, number)
            call_each(self.options.callbacks, on_epoch)

    def _reached_by(self, sent: Sent) -> Reached:
        return self.source.reached(sent.step, sent.position)

    def _record(self, sent: Sent) -> dict[str, float]:
        """Waits for a step, and records its metrics if due; returns them if they were read."""
        with self.clock.measure("devices"):  # at each step: no later state may be saved
            progress, seen = self.numerics.look(self.run.progress, sent, self.run.state)
        self.run.progress = progress
        if seen.note:
            self.note(seen.note, "spike" if seen.fields else "skipped", step=sent.step)
        now = self._reached_by(sent)
        is_due = self._log_every.ended(self.reached, now) or sent.step == self.course.num_steps
        is_logged = is_due or "spike" in seen.fields
        if not (is_logged or self.options.callbacks):
            return {}
        values = {name: float(x) for name, x in jax.device_get(dict(sent.metrics)).items()}
        values |= seen.fields
        if is_logged:
            self._log(now, values, count_rows(sent.batch))
        return values

    def _log(self, now: Reached, values: Mapping[str, float], num_rows: int) -> None:
        step = now.step
        record: JsonObject = {**now.fields, "split": "train", **values}
        if self.options.learning_rate is not None:
            record["learning_rate"] = self.learning_rate()
        if (spent := self.clock.spent(step)) is not None:
            record |= {"step_seconds": spent.step, "data_wait_seconds": spent.data}
            record |= {"host_seconds": spent.host} | self.work.rates(record, num_rows)
            with self.clock.measure("devices"):
                record |= self.processes.compare(spent, self.run.state.step)
        record |= self.profile.take_fields()
        metrics = copy.deepcopy(record)  # a callback may change it
        self.run.progress = dataclasses.replace(self.run.progress, metrics=metrics)
        self.run.records.append(record)
        # Before callbacks, which may save this step: a run that resumes there has its record.
        self._keep(record)
        self.progress.log(record)

    def _keep(self, record: Record) -> None:
        for sink in self._kept:
            sink.log(record)

    def learning_rate(self) -> float | None:
        """The learning rate of the last step; None without a step or a schedule."""
        schedule, updates = self.options.learning_rate, self.run.progress.updates
        return None if schedule is None or updates < 0 else float(np.asarray(schedule(updates)))

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Reports an evaluation of the newest state."""
        run = self.run
        record: JsonObject = {**self.reached.fields, "split": "eval", **metrics}
        evaluations = [*run.evaluations, copy.deepcopy(record)]
        run.progress = dataclasses.replace(run.progress, evaluations=evaluations)
        self.run.records.append(record)
        self.progress.log(record)
        try:
            call_each(
                self.options.callbacks,
                lambda callback: callback.on_eval(run, copy.deepcopy(record)),
            )
        finally:  # A run that is killed before this evaluates, and calls them, again.
            self._keep(record)
        self.course.best = self._best()

    def layers(self, step: int, layers: Layers) -> None:
        """Records the norms of each layer's parameters before a step, and of its gradient in it."""
        record: JsonObject = {"step": step, "split": "layers"}
        for kind in ("parameter", "gradient"):
            record |= {f"{kind}_norm/{name}": norms[kind] for name, norms in layers.items()}
        self.run.records.append(record)
        self._keep(record)

    def give(self, record: JsonObject) -> None:
        """Gives a record of a callback to the sinks; arrays only to those that the user chose."""
        plain = {name: x for name, x in record.items() if not isinstance(x, np.ndarray)}
        self.run.records.append(plain)
        if self.files is not None:
            self.files.metrics.log(plain)
        for sink in self._guarded:
            sink.log(record)

    def report_best(self) -> None:
        """Prints a line on the best evaluation of each metric that was watched."""
        for callback in self._watching():
            self.note(callback.conclusion(self.run))

    def _best(self) -> str:
        """The best evaluation so far, of the first metric that is watched; "" without one."""
        return next((x.best_so_far(self.run) for x in self._watching()), "")

    def _watching(self) -> list[Watching]:
        """One callback for each metric that is watched."""
        return list({x.metric: x for x in watching(self.options.callbacks)}.values())

    def report_throughput(self) -> None:
        """Prints a line on the speed of the run, that of its median record, and on peak memory."""
        timed = [x for x in self.run.records if "step_seconds" in x]
        if timed:
            median = sorted(timed, key=operator.itemgetter("step_seconds"))[len(timed) // 2]
            rates = self.work.rates(median, self.work.num_rows)
            traced = [x for x in self.run.records if EXPOSED_SHARE in x]
            traced = traced or [self.profile.take_fields()]
            rates[EXPOSED_SHARE] = traced[-1].get(EXPOSED_SHARE)
            self.note(f"median {summary(rates, self.work.unit)}")
