"""Time per step, without compilation, evaluation and saving."""

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """A clock that starts at a step that is finished now."""

    def __init__(self, step: int) -> None:
        self._since, self._step, self._waited = time.perf_counter(), step, 0.0

    def pause(self, seconds: float) -> None:
        """Excludes seconds that were not spent on steps."""
        self._since += seconds

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While open, the loop waits for data."""
        since = time.perf_counter()
        yield
        self._waited += time.perf_counter() - since

    def seconds_per_step(self, step: int) -> dict[str, float]:
        """Means since the last call, if any; "data_wait_seconds" is a part of "step_seconds"."""
        now, num_steps = time.perf_counter(), step - self._step
        if num_steps < 1:
            return {}
        seconds = {
            "step_seconds": (now - self._since) / num_steps,
            "data_wait_seconds": self._waited / num_steps,
        }
        self._since, self._step, self._waited = now, step, 0.0
        return seconds
