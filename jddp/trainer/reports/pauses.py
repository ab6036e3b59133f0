"""The time that a run still needs: its steps, and the evaluations and saves between them.

evaluations = Pause.at_ends_of(OptimizerSteps(100))
with evaluations.measured(): ...
seconds_left(400, 1170, 0.02, [evaluations])
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator

from jddp.data.periods import Period


@dataclasses.dataclass
class Pause:
    """Evaluations or saves of a run, for which its steps pause.

    Attributes:
      every_steps: Steps between two of them, on average; infinity for one at the end alone.
      seconds: Time of the newest one, which compiles nothing if it is not the first; 0 before.
    """

    every_steps: float
    seconds: float = 0.0

    @classmethod
    def at_ends_of(cls, period: Period | None, steps_per_epoch: float | None = None) -> "Pause":
        """The pauses at the ends of a period, or at the end of the run alone."""
        return cls(math.inf if period is None else period.in_steps(steps_per_epoch))

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """While open, the steps pause."""
        since = time.perf_counter()
        yield
        self.seconds = time.perf_counter() - since

    def num_left(self, step: int, num_steps: int) -> int:
        """Number of those from the end of `step` on: at multiples of the period, and at the end."""
        every = self.every_steps
        return 1 + int((num_steps - 1) // every - (step - 1) // every)


def seconds_left(
    step: int, num_steps: int, step_seconds: float, pauses: Iterable[Pause] = ()
) -> float:
    """An estimate of the time from the end of `step` to the end of the run."""
    paused = sum(pause.seconds * pause.num_left(step, num_steps) for pause in pauses)
    return (num_steps - step) * step_seconds + paused
