"""The learning-rate range test: a few steps at rising rates show which rate a job can take.

    found = find_rate(config)
    print(found)            # the loss over the rate, and a suggestion
    found.suggestion        # 0.003

The test is a job of its own, whose config has an exponential schedule: no other room knows of it.
It evaluates nothing and keeps nothing.

References:
  L. N. Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017, section 3.3.
  https://arxiv.org/abs/1506.01186. There the rate rises in a straight line, and the reader chooses.
"""

import contextlib
import itertools
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jddp.config.files import with_overrides
from jddp.config.schema import Config
from jddp.ground.errors import NumericsError, UsageError
from jddp.trainer.fit import fit
from jddp.trainer.job.build import build
from jddp.trainer.job.parts import Schedule
from jddp.trainer.run import Callback, Run

FIRST, LAST, NUM_STEPS = 1e-7, 10.0, 100
AROUND = 2  # Losses on each side of a loss that are averaged with it.
BELOW = 10.0  # The suggestion is this many times smaller than the rate of the lowest loss.
# Multiple of the change from step to step; a loss that does not fall exceeds it in 1 %.
NOISE = 3.0
DIVERGED = 4.0  # A loss diverges once it has risen by this many times its fall so far.
COLUMNS, ROWS = 64, 12  # Width and height of the picture.


@dataclass(frozen=True)
class RangeTest:
    """Losses at rising rates; its `str` is a picture and a suggestion.

    Attributes:
      rates: Learning rate of each step.
      losses: Loss of each step, finite.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def smoothed(self) -> list[float]:
        """The mean of each loss and its neighbours."""
        return [
            statistics.fmean(self.losses[max(0, i - AROUND) : i + AROUND + 1])
            for i in range(len(self.losses))
        ]

    @property
    def lowest(self) -> int:
        """Number of the step with the lowest smoothed loss."""
        return min(range(len(self.losses)), key=self.smoothed.__getitem__)

    @property
    def steepest(self) -> int:
        """Number of the step, up to the lowest, at which the smoothed loss falls fastest."""
        falls = [a - b for a, b in itertools.pairwise(self.smoothed[: self.lowest + 1])]
        return max(range(len(falls)), key=falls.__getitem__, default=0)

    @property
    def suggestion(self) -> float | None:
        """A tenth of the rate with the lowest loss; None if the loss has not fallen."""
        first, lowest = self.smoothed[0], self.smoothed[self.lowest]
        has_fallen = first - lowest > NOISE * _change(self.losses)
        return self.rates[self.lowest] / BELOW if has_fallen else None

    @property
    def verdict(self) -> str:
        """The suggestion and its reason, in a sentence or two."""
        if self.suggestion is None:
            return (
                f"no suggestion: from rate {self.rates[0]:.2g} to {self.rates[-1]:.2g} the loss "
                "has not fallen"
            )
        return (
            f"suggestion: optimizer.learning_rate={self.suggestion:.2g}, a tenth of the rate with "
            f"the lowest loss ({self.rates[self.lowest]:.2g}). The loss falls fastest at "
            f"{self.rates[self.steepest]:.2g}"
        )

    def __str__(self) -> str:
        """A picture of the smoothed loss over the rate, and the verdict."""
        smoothed = self.smoothed
        picture = draw(smoothed, high=max(smoothed[: self.lowest + 1]))
        ends = f"{self.rates[0]:.2g}"
        ends += f"{self.rates[-1]:.2g}".rjust(COLUMNS - len(ends))
        axis = [f"{'':9}{ends}", f"{'':9}learning rate", ""]
        return "\n".join([*picture, *axis, *textwrap.wrap(self.verdict, 79)])


def find_rate(config: Config) -> RangeTest:
    """Trains a job for at most a hundred steps, until its loss diverges.

    Args:
      config: Config of the job.

    Raises:
      Error: As `jddp.train` does.
      UsageError: If its optimizer does not follow the schedule, or no step had a finite loss.
    """
    job = build(rising(config))
    if job.learning_rate is None:
        raise UsageError(
            "--find-rate: the optimizer has no learning rate, or its own in "
            "optimizer.kwargs.learning_rate. Remove that key."
        )
    losses = _Losses(job.learning_rate)
    with contextlib.closing(job.train_batches()) as batches, contextlib.suppress(NumericsError):
        fit(
            job.ddp,
            batches,
            num_steps=NUM_STEPS,
            state=job.first_state(),
            callbacks=[losses],
            learning_rate=job.learning_rate,
            seed=config.seed,
        )
    if not losses.found:
        raise UsageError("--find-rate: no step had a finite loss. Look at the data and the loss.")
    return RangeTest(*zip(*losses.found, strict=True))


def rising(config: Config) -> Config:
    """The config of the test: rates rise exponentially, and groups keep their ratios."""
    section = config.optimizer
    own = {name: group.learning_rate for name, group in section.groups.items()}
    growth = {"transition_steps": NUM_STEPS - 1, "decay_rate": LAST / FIRST}
    growth |= {"transition_begin": 0, "staircase": False}
    return with_overrides(
        config,
        {
            "optimizer.learning_rate": FIRST,
            **{
                f"optimizer.groups.{name}.learning_rate": FIRST * rate / section.learning_rate
                for name, rate in own.items()
                if rate is not None
            },
            "optimizer.warmup_steps": 0,
            "optimizer.schedule": {"name": "exponential_decay", "kwargs": growth},
            "train.num_steps": NUM_STEPS,
            "run.dir": None,
        },
    )


class _Losses(Callback):
    """Collects rates and losses, and stops the run when the loss diverges."""

    def __init__(self, rate: Schedule) -> None:
        self.found = list[tuple[float, float]]()
        self._rate = rate
        self._skipped = 0.0

    def on_step(self, run: Run, metrics: Mapping[str, float]) -> None:
        loss, before = metrics["loss"], self._skipped
        self._skipped = metrics.get("skipped", before)
        # A skipped step, such as one that lowers the loss scale, moves no schedule.
        if math.isfinite(loss) and self._skipped == before:
            self.found.append((float(np.asarray(self._rate(len(self.found)))), loss))
        if not math.isfinite(loss) or (self.found and _diverges([x for _, x in self.found])):
            run.stop("the loss diverges")


def _diverges(losses: Sequence[float]) -> bool:
    """Whether the last losses are above the lowest by several times the earlier gain."""
    recent = statistics.fmean(losses[-AROUND - 1 :])
    lowest = min(losses)
    gained = max(losses[0] - lowest, 0.1 * abs(losses[0]), _change(losses))
    return recent > lowest + DIVERGED * gained


def _change(losses: Sequence[float]) -> float:
    """The median change of the loss from one step to the next."""
    return statistics.median([abs(a - b) for a, b in itertools.pairwise(losses)] or [0.0])


def draw(values: Sequence[float], *, high: float) -> list[str]:
    """Lines of text with a curve, and the scale at its left; values above `high` are at its top.

    Args:
      values: Values at equal distances.
      high: Value of the highest line.
    """
    low = min(values)
    unit = (high - low) / (ROWS - 1) or 1.0
    lines = [[" "] * COLUMNS for _ in range(ROWS)]
    for column in range(COLUMNS):
        value = values[column * len(values) // COLUMNS]
        lines[round((high - min(value, high)) / unit)][column] = "*"
    scale = [f"{high:8.3g}", *[" " * 8] * (ROWS - 2), f"{low:8.3g}"]
    return [f"{x} {''.join(line)}".rstrip() for x, line in zip(scale, lines, strict=True)]
