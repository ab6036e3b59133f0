"""The time of steps: per phase, and in a trace of some steps.

with clock.measure("data"): ...        # the loop waits for data
with clock.measure("devices"): ...     # the devices compute, or wait for other processes
clock.spent(step)                      # the rest of the time is the host's
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from jddp.engine.state import TrainState

STEP, DATA = "jddp step", "jddp data"  # names of the annotations in a run's traces
log = logging.getLogger("jddp")


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
