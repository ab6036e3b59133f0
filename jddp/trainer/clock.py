"""Time per step, as a user means it: without compilation, evaluation and saving."""

import time


class Clock:
    """Measures from `step`, which is finished now."""

    def __init__(self, step: int) -> None:
        self._since, self._step = time.perf_counter(), step

    def pause(self, seconds: float) -> None:
        """Takes out seconds that were not spent on steps."""
        self._since += seconds

    def seconds_per_step(self, step: int) -> float | None:
        """Mean since the last call; None where no step lies between."""
        now, num_steps = time.perf_counter(), step - self._step
        if num_steps < 1:
            return None
        seconds = (now - self._since) / num_steps
        self._since, self._step = now, step
        return seconds
