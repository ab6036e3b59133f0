"""The time of a loop per step, and the part of it that the loop spends in each phase.

    with clock.waiting(): ...         # for data
    with clock.on_devices(): ...      # the devices compute, or wait for other processes
    clock.spent(step)

The rest of the time is that of the host.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax

from jddp.trainer.profile import DATA


class Spent(NamedTuple):
    """Seconds of a process per step.

    Attributes:
      step: Time without evaluation and saving.
      data: Part of it in which the loop waits for data.
      devices: Time in which it waits for devices, also in evaluations.
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
        self._paused = self._waited = self._on_devices = 0.0

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """While open, time is not spent on steps."""
        since = time.perf_counter()
        yield
        self._paused += time.perf_counter() - since

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While open, the loop waits for data."""
        since = time.perf_counter()
        with jax.profiler.TraceAnnotation(DATA):
            yield
        self._waited += time.perf_counter() - since

    @contextlib.contextmanager
    def on_devices(self) -> Iterator[None]:
        """While open, the loop waits for devices, which may wait for those of other processes."""
        since = time.perf_counter()
        yield
        self._on_devices += time.perf_counter() - since

    def spent(self, step: int) -> Spent | None:
        """Means per step since the last call, or None if there was no step."""
        num_steps = step - self._step
        if num_steps < 1:
            return None
        seconds = time.perf_counter() - self._since
        host = seconds - self._waited - self._on_devices
        of_all = (seconds - self._paused, self._waited, self._on_devices, host)
        self._begin(step)
        return Spent(*(x / num_steps for x in of_all))
