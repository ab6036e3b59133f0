"""Curves of any length in at most a thousand points, each with the range of its values.

    curve = Thinned()
    for record in records:
        curve.add(record["step"], record["loss"])
    curve.finish()
    curve.steps, curve.values, curve.low, curve.high

Each point stands for equally many values, but for the last one. When there are too many points,
each two of them become one: so a million values take no more memory than a thousand.
"""

import math
from typing import NamedTuple, TypeGuard

MOST_POINTS = 1_000
LARGEST = 1e30  # beyond it a drawing has no scale: such a value counts as infinite


def is_drawable(value: object) -> TypeGuard[float]:
    """Whether a value is a number that can be drawn."""
    return isinstance(value, int | float) and -LARGEST < value < LARGEST  # as no NaN is


class At(NamedTuple):
    """A value of a curve.

    Attributes:
      value: The value.
      step: The step.
    """

    value: float
    step: int


class Thinned:
    """A curve that is read value by value.

    Attributes:
      steps: The last step of each point.
      values: The mean of the values of each point.
      low: The smallest of them.
      high: The largest of them.
      smallest: The first of the smallest values, with its step; None without a finite value.
      largest: The first of the largest values; None without a finite value.
      last: The last value; None if it was not finite.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.smallest: At | None = None
        self.largest: At | None = None
        self.last: float | None = None
        self._size = 1  # values of a point
        self._open: list[float] = []  # those of the next point
        self._last_step = 0

    def add(self, step: int, value: float | None) -> None:
        """Adds a value; None is one that is not finite."""
        if not is_drawable(value):
            self.last = None
            return
        self.last, self._last_step = value, step
        if self.smallest is None or value < self.smallest.value:
            self.smallest = At(value, step)
        if self.largest is None or value > self.largest.value:
            self.largest = At(value, step)
        self._open.append(value)
        if len(self._open) == self._size:
            self._close(step)

    def finish(self) -> None:
        """Makes a point of the last values, which are fewer than those of the others."""
        if self._open:
            self._close(self._last_step)

    def _close(self, step: int) -> None:
        values, self._open = self._open, []
        self.steps.append(step)
        self.values.append(math.fsum(values) / len(values))
        self.low.append(min(values))
        self.high.append(max(values))
        if len(self.steps) == MOST_POINTS:
            self._halve()

    def _halve(self) -> None:
        self.steps = self.steps[1::2]
        pairs = zip(self.values[::2], self.values[1::2], strict=True)
        self.values = [(a + b) / 2 for a, b in pairs]
        self.low = [*map(min, self.low[::2], self.low[1::2])]
        self.high = [*map(max, self.high[::2], self.high[1::2])]
        self._size *= 2
