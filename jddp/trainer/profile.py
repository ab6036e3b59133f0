"""A trace of some steps of a run, by `jax.profiler`: `jddp explain --trace RUN` reads it."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from jddp.engine.state import TrainState
from jddp.errors import DataError
from jddp.names.plugins import OPTIONS, find
from jddp.trainer.reports.lines import EXPOSED_SHARE

log = logging.getLogger("jddp")
STEP, DATA = "jddp step", "jddp data"  # names of what a run annotates in its traces


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
        self._is_recorded = False

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
            self._is_recorded = True

    def take_fields(self) -> dict[str, float]:
        """The share of the traced steps in which devices only communicate, for one record.

        Empty before the trace has ended, after the share was taken, and where nothing reads it.
        """
        read_trace = find(OPTIONS, "trace") if self._is_recorded else None
        self._is_recorded = False
        if read_trace is None or self._folder is None:
            return {}
        try:
            times = read_trace(self._folder).times
        except DataError as error:
            log.warning("train.profile_steps: %s", error)
            return {}
        return {EXPOSED_SHARE: times.exposed / times.step}

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Calls of Python slow the host, and fill the file.
        try:
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
            self._is_open = True
        except RuntimeError as error:
            log.warning("train.profile_steps: nothing is recorded: %s", error)
