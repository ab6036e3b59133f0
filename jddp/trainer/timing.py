"""The time of steps: per phase, in a trace of some steps, and the process that the others wait for.

    with clock.measure("data"): ...        # the loop waits for data
    with clock.measure("devices"): ...     # the devices compute, or wait for other processes
    clock.spent(step)                      # the rest of the time is the host's

Replicas synchronize in each step, so all steps are as slow as the steps of the slowest process, and
the others spend the time waiting for it. At each record every process publishes its own times
through the coordination service, and process 0 reads the times of an earlier record: no
device and no process waits for this.

    find_slowest(spent_by_each_process)         # Slowest(process=2, phase="data", ratio=1.4)

A process that others wait for waits for none. So the least time on devices, of all processes, is
near to the time that the slowest devices need. Which devices these are is not measured: inside a
step they wait for each other (`jddp doctor` compares them).
"""

import contextlib
import itertools
import json
import logging
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

import jddp.distributed.coordination as job
from jddp.engine.state import TrainState
from jddp.ground.typing import JsonObject

STEP, DATA = "jddp step", "jddp data"  # names of the annotations in a run's traces
SLOW = 1.2  # Ratio to the other processes from which a process is slow.
NUM_RECORDS = 3  # Slow records in a row before a process is reported.
RECORDS_BEHIND = 2  # Age, in records, of the times that process 0 reads: all have published them.
WAYS_OUT = {
    "data": "look at its disk and its network, or read in more processes (data.num_workers)",
    "host": "look at callbacks, at the disk of the run directory and at other programs",
}
log = logging.getLogger("jddp")
_numbers = itertools.count()


class Spent(NamedTuple):
    """Seconds of a process per step.

    Attributes:
      step: Time without evaluation and saving.
      data: Part of `step` spent waiting for data.
      devices: Time spent waiting for devices, also in evaluations.
      host: Rest of all time: callbacks, saving, reports.
    """

    step: float
    data: float
    devices: float
    host: float


class Clock:
    """Time per step, without evaluation and saving; it starts at a step that is finished now."""

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
        of_all = (seconds - pause, data, devices, seconds - data - devices)
        self._begin(step)
        return Spent(*(x / num_steps for x in of_all))


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
            self._start()
        elif number > self._last:
            self.close()
        with jax.profiler.StepTraceAnnotation(STEP, step_num=number):
            yield

    def close(self) -> None:
        """Ends the trace, if one is recorded."""
        if self._is_open:
            self._is_open = False
            jax.profiler.stop_trace()

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Traced Python calls slow the host and fill the file.
        try:
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
            self._is_open = True
        except RuntimeError as error:
            log.warning("train.profile_steps: nothing is recorded: %s", error)


class Slowest(NamedTuple):
    """The process for which the others wait.

    Attributes:
      process: Number of the process.
      phase: "data" or "host": where it takes longer than the others.
      ratio: Time of the process over the others' time, without their waiting for it.
    """

    process: int
    phase: str
    ratio: float


def find_slowest(of_all: Sequence[Spent]) -> Slowest:
    """Returns the process that takes the longest by itself.

    Args:
      of_all: Times of each process, two or more, in their order.
    """
    devices = min(spent.devices for spent in of_all)
    phases = [{"data": spent.data, "host": spent.host} for spent in of_all]
    process = max(range(len(phases)), key=lambda number: sum(phases[number].values()))
    mine = phases.pop(process)
    usual = {name: statistics.median(x[name] for x in phases) for name in mine}
    phase = max(mine, key=lambda name: mine[name] - usual[name])
    ratio = (devices + sum(mine.values())) / (devices + sum(usual.values()))
    return Slowest(process, phase, ratio)


class Processes:
    """The comparison of the processes of a job; a process alone compares nothing.

    Args:
      note: Function that prints a sentence.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._key = f"jddp/spent/{next(_numbers)}"
        self._slow: tuple[int, str] | None = None
        self._num_slow = self._num_records = 0

    def compare(self, spent: Spent) -> JsonObject:
        """Publishes the time of this process since the last record; process 0 returns fields."""
        if job.num_processes() == 1:
            return {}
        self._num_records += 1
        name = f"{self._key}/{self._num_records}/{job.process_index()}"
        job.try_publish(name, json.dumps([socket.gethostname(), spent]))
        earlier = f"{self._key}/{self._num_records - RECORDS_BEHIND}"
        texts = job.published(earlier) if job.process_index() == 0 else {}
        if len(texts) < job.num_processes():
            return {}
        job.unpublish(earlier)
        hosts, times = zip(*(json.loads(texts[process]) for process in sorted(texts)), strict=True)
        slowest = find_slowest([Spent(*x) for x in times])
        host = hosts[slowest.process]
        self._watch(slowest, host)
        fields = {f"slowest_{name}": x for name, x in slowest._asdict().items()}
        return {**fields, "slowest_host": host}

    def _watch(self, slowest: Slowest, host: str) -> None:
        """Reports a process that is slow in some records in a row, once."""
        process, phase, ratio = slowest
        slow = (process, phase) if ratio > SLOW else None
        self._num_slow = self._num_slow + 1 if slow == self._slow else 1
        self._slow = slow
        if slow is not None and self._num_slow == NUM_RECORDS:
            self._note(
                f"process {process} on {host} is {ratio:.1f} times slower than the others, in "
                f"{phase}, and they wait for it: {WAYS_OUT[phase]}"
            )
