"""Reads the metrics of each step after the next step was sent, and reports them with their rates.

A step's metrics are read late, so that the devices never wait for the host. They go to the check
for NaN and infinity, to the callbacks and, if due, as a record to the sinks: the terminal, the
metrics file and the sinks that the user has chosen.

    work = measure(ddp, batch)       # once, after the first step: traces and compiles nothing again
    work.rates(record, num_rows)     # fields of a record, from the time and the rows of a step

The work of a step is in proportion to its rows, so a record costs divisions alone. Only tokens
that are predicted and not masked count: the valid entries of the loss.
"""

import contextlib
import copy
import dataclasses
import logging
import operator
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jddp.data.periods import Epochs, OptimizerSteps, Reached
from jddp.engine.compiled import Trainable
from jddp.engine.state import name_of
from jddp.ground.typing import Batch, JsonObject, Metrics, Record
from jddp.inspection.flops import count_flops, seconds_at_peak, uncounted
from jddp.inspection.memory import compiled_bytes, limit_bytes, peak_bytes
from jddp.modules.rows import count_rows
from jddp.trainer.numerics import Numerics, Sent
from jddp.trainer.prefetch import Source
from jddp.trainer.reports.lines import Course, Display, summary
from jddp.trainer.reports.run_directory import RunDirectory
from jddp.trainer.reports.sinks import GuardedSink, Sink, Start
from jddp.trainer.run import Options, Run, as_period, call_each
from jddp.trainer.watching import Watching, watching

# Names of arrays that mark the examples of a batch as images, or as sequences of tokens.
_IMAGES = {"image", "images", "pixel_values"}
_TOKENS = {"tokens", "input_ids", "inputs"}

EPOCH = Epochs(1)
log = logging.getLogger("jddp")


class Spent(NamedTuple):
    """Seconds of a process per step.

    Attributes:
      step: Time without evaluation and saving.
      data: Part of `step` spent waiting for data.
      host: Rest of all time, without waiting for devices: callbacks, saving, reports.
    """

    step: float
    data: float
    host: float


class Clock:
    """Time per step, without evaluation and saving; it starts at a step that is finished now.

    with clock.measure("data"): ...        # the loop waits for data
    with clock.measure("devices"): ...     # the devices compute, or wait for other processes
    clock.spent(step)                      # the rest of the time is the host's
    """

    def __init__(self, step: int) -> None:
        self._begin(step)

    def _begin(self, step: int) -> None:
        self._since = time.perf_counter()
        self._step = step
        self._seconds = {"pause": 0.0, "data": 0.0, "devices": 0.0}

    @contextlib.contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Measures the time of a block.

        Args:
          phase: "data" or "devices", for which the loop waits; or "pause", which is no step.
        """
        since = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - since

    def spent(self, step: int) -> Spent | None:
        """Means per step since the last call, or None if there was no step."""
        num_steps = step - self._step
        if num_steps < 1:
            return None
        seconds = time.perf_counter() - self._since
        pause, data, devices = self._seconds.values()
        of_all = (seconds - pause, data, seconds - data - devices)
        self._begin(step)
        return Spent(*(x / num_steps for x in of_all))


@dataclasses.dataclass
class Work:
    """The work of a step, on all devices together.

    Attributes:
      devices: Devices of this process, whose peak memory is read.
      num_rows: Number of rows of the step that was measured.
      per_step: The amount behind each rate in that step, by name of its field in records.
      has_token_losses: Whether its loss has an entry for each token of its sequences.
      unit: Unit of its examples, for people.
      memory: Memory that the compiler has assigned to it on a device, and memory that a device can
        give out, by name of the field in records; empty if devices have no statistics.
    """

    devices: Sequence[jax.Device]
    num_rows: int
    per_step: dict[str, float]
    has_token_losses: bool = False
    unit: str = "ex"
    memory: dict[str, float] = dataclasses.field(default_factory=dict)

    def rates(self, record: Record, num_rows: int) -> dict[str, float | None]:
        """Further fields of a record, as far as they are known, for steps of so many rows.

        Args:
          record: Record with "step_seconds", and with "count", which may count tokens.
          num_rows: Number of rows of a step.
        """
        seconds = record["step_seconds"]
        share = num_rows / max(self.num_rows, 1) / seconds
        fields: dict[str, float | None] = {n: x * share for n, x in self.per_step.items()}
        if self.has_token_losses:
            fields["tokens_per_second"] = record["count"] / seconds
        if (peak := peak_bytes(self.devices)) is not None:
            fields |= {"peak_memory_bytes": peak, **self.memory}
        return fields


def measure(ddp: Trainable, batch: Batch) -> Work:
    """Counts the work of a step that has run; if that fails, the log has the reason.

    Args:
      ddp: The object that took the step.
      batch: Rows of the step, of all processes.
    """
    num_rows = count_rows(batch)
    work = Work(ddp.mesh.local_devices, num_rows, {"examples_per_second": num_rows})
    try:
        _count(work, ddp, batch)
    except Exception as error:  # A report is no reason to end a run.
        log.warning("The FLOPs of a step are not reported, since they cannot be counted: %r", error)
    return work


def _count(work: Work, ddp: Trainable, batch: Batch) -> None:
    """Adds facts from the traced passes and the compiled step."""
    mesh, steps = ddp.mesh, ddp.steps
    traced, num_parts = steps.planned(batch).traced, steps.rows.num_micro_batches
    assert traced is not None  # There were rows.
    flops = {kind: x * num_parts for kind, x in count_flops(traced).items()}
    if names := uncounted(traced):
        log.warning("A step has more FLOPs than are reported, in %s.", ", ".join(sorted(names)))
    work.per_step["model_flops_per_second"] = sum(flops.values())
    seconds = seconds_at_peak(flops, mesh.devices.flat[0].device_kind)
    if seconds:
        work.per_step["mfu"] = seconds / mesh.size
    _name_examples(work, batch, traced.sums["loss"].num_entries * num_parts)
    if peak_bytes(work.devices) is not None:
        # JAX has kept the program of the step, and compiles nothing again.
        work.memory = {"predicted_memory_bytes": compiled_bytes(steps.lower(batch).compile())}
        if (limit := limit_bytes(work.devices)) is not None:
            work.memory["memory_limit_bytes"] = limit


def _name_examples(work: Work, batch: Batch, num_entries: int) -> None:
    """Adds the unit of examples, and how tokens in sequences are counted.

    Tokens are the valid entries of the loss; if it has one entry a row, the batch's tokens.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    named = {name_of(path).rpartition("/")[2]: x for path, x in leaves}
    if named.keys() & _IMAGES:
        work.unit = "images"
    for x in (named[name] for name in named.keys() & _TOKENS):
        if x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.integer):
            work.has_token_losses = num_entries > len(x)
            if not work.has_token_losses:
                work.per_step["tokens_per_second"] = x.size


@dataclasses.dataclass(eq=False)
class Reporter:
    """Reports the steps and evaluations of a run.

    Args:
      run: The run.
      options: Periods of reports.
      files: The run directory, or None.
      numerics: Check of each step.
      source: The training batches, which know their epochs.

    Attributes:
      reached: How far the run had come with the last step that was reported.
      clock: Time of steps since the last record.
      work: The work of a step, for its rates.
      course: Facts of the run for its progress.
      progress: Sink that prints records and sentences, or shows them in a notebook.
      note: Function that prints a sentence.
    """

    run: Run
    options: Options
    files: RunDirectory | None
    numerics: Numerics
    source: Source

    def __post_init__(self) -> None:
        """Begins the display of progress."""
        is_writer = jax.process_index() == 0
        options, steps_per_epoch = self.options, self.source.steps_per_epoch
        self._log_every = as_period(options.log_every_steps) or OptimizerSteps(50)
        self.course = Course(options.num_steps or 0, steps_per_epoch=steps_per_epoch)
        self.reached = Reached(self.run.step)
        self.progress = Display(self.course, is_writer=is_writer)
        self.note = self.progress.note
        chosen = self.options.sinks if is_writer else ()
        self._guarded = [GuardedSink(sink.name, sink.make) for sink in chosen]
        file = [] if self.files is None else [self.files.metrics]
        self._kept: list[Sink] = [*file, *self._guarded]  # The terminal keeps no records.
        self.clock = Clock(0)
        self.work = Work((), 0, {})
        self._waiting: Sent | None = None  # the newest step, whose metrics are not read yet

    def begin(self) -> None:
        """Makes the sinks that the user has chosen, once the run is where it begins or resumes."""
        self.course.best = self._best()
        for sink in self._guarded:
            sink.begin(Start(self.run.run_dir, self.run.config or {}, self.run.step))

    def close(self) -> None:
        """Closes the sinks that the user has chosen; may wait for them."""
        for sink in self._guarded:
            sink.close()

    def measured(self, work: Work) -> None:
        """Takes the work of a step, after the first one, which is compiled: time begins here."""
        self.work = work
        self.course.unit = work.unit
        self.clock = Clock(self.run.step)

    def next(self, sent: Sent | None = None) -> None:
        """Reports the pending step; `sent`, if given, becomes the pending step."""
        late, self._waiting = self._waiting, sent
        if late is None:
            return
        now = self.source.reached(late.step, late.position)
        values = {"step": late.step, **self._record(late, now)}
        # Counted before the callbacks, since one of them may fail.
        before, self.reached = self.reached, now
        callbacks = self.options.callbacks
        call_each(callbacks, lambda callback: callback.on_step(self.run, dict(values)))
        for number in EPOCH.ended(before, now):
            call_each(callbacks, operator.methodcaller("on_epoch", self.run, number))

    def _record(self, sent: Sent, now: Reached) -> dict[str, float]:
        """Waits for a step, and records its metrics if due; returns them if they were read."""
        num_skipped = self.run.progress.skipped.total
        with self.clock.measure("devices"):  # Each step is checked before its state is saved.
            looked = self.numerics.look(self.run.progress, sent, self.run.state)
        self.run.progress, note, spike = looked
        if note:
            self.note(note, "spike" if spike else "skipped", step=sent.step)
        is_due = self._log_every.ended(self.reached, now) or sent.step == self.course.num_steps
        is_logged = is_due or bool(spike)
        if not (is_logged or self.options.callbacks):
            return {}
        values = {name: float(x) for name, x in jax.device_get(dict(sent.metrics)).items()}
        values |= spike
        if not is_logged:
            return values
        record: JsonObject = {**now.fields, "split": "train", **values}
        if (schedule := self.options.learning_rate) is not None:
            record["learning_rate"] = float(np.asarray(schedule(sent.step - 1 - num_skipped)))
        if (spent := self.clock.spent(now.step)) is not None:
            record |= {"step_seconds": spent.step, "data_wait_seconds": spent.data}
            rates = self.work.rates(record, count_rows(sent.batch))
            record |= {"host_seconds": spent.host} | rates
        metrics = copy.deepcopy(record)  # a callback may change it
        self.run.progress = dataclasses.replace(self.run.progress, metrics=metrics)
        self.run.records.append(record)
        # Kept before the callbacks: one may save this step, and a run that resumes there needs it.
        self._keep(record)
        self.progress.log(record)
        return values

    def _keep(self, record: Record) -> None:
        for sink in self._kept:
            sink.log(record)

    def evaluated(self, metrics: Metrics) -> None:
        """Reports an evaluation of the newest state."""
        run = self.run
        record: JsonObject = {**self.reached.fields, "split": "eval", **metrics}
        evaluations = [*run.evaluations, copy.deepcopy(record)]
        run.progress = dataclasses.replace(run.progress, evaluations=evaluations)
        run.records.append(record)
        self.progress.log(record)
        try:
            call_each(
                self.options.callbacks,
                lambda callback: callback.on_eval(run, copy.deepcopy(record)),
            )
        finally:  # A run that is killed before this line evaluates again.
            self._keep(record)
        self.course.best = self._best()

    def give(self, record: JsonObject) -> None:
        """Gives a record of a callback to the sinks; only sinks that the user chose get arrays."""
        plain = {name: x for name, x in record.items() if not isinstance(x, np.ndarray)}
        self.run.records.append(plain)
        if self.files is not None:
            self.files.metrics.log(plain)
        for sink in self._guarded:
            sink.log(record)

    def _best(self) -> str:
        """The best evaluation so far, of the first metric that is watched; "" without one."""
        return next((x.best_so_far(self.run) for x in self._watching()), "")

    def report_best(self) -> None:
        """Prints a line on the best evaluation of each metric that was watched."""
        for callback in self._watching():
            self.note(callback.conclusion(self.run))

    def _watching(self) -> list[Watching]:
        """One callback for each metric that is watched."""
        return list({x.metric: x for x in watching(self.options.callbacks)}.values())

    def report_throughput(self) -> None:
        """Prints a line on the speed of the run's median record, and on peak memory."""
        timed = [x for x in self.run.records if "step_seconds" in x]
        if timed:
            median = sorted(timed, key=operator.itemgetter("step_seconds"))[len(timed) // 2]
            rates = self.work.rates(median, self.work.num_rows)
            self.note(f"median {summary(rates, self.work.unit)}")
