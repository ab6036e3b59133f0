"""Loss spikes: losses far above the losses before them, by a rule that a few outliers do not move.

    spike:  loss > median + 20 * max(MAD, 0.5 % of the median), of the last 100 finite losses

The MAD, the median absolute deviation, is 0.67 standard deviations of Gaussian noise, so 20 MADs
are 13.5 of these. False alarms in a million steps: none for Gaussian noise, 3 for Laplace noise, 20
for Student's t with 5 degrees of freedom, 400 with 3 (measured; `tests/parts/trainer`). A falling
loss raises no alarm. A loss that rises for good is a spike until it is nearly half of the window.

The loss of a step is global, so all processes find the same spikes. It is judged by losses up to
two steps before: these are known when a step is sent, and a step may be left out while it runs.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jddp.trainer.progress import Losses

LAG = 2  # steps from the last loss that a limit depends on, to the step that it is for


class Spike(NamedTuple):
    """A loss far above the losses before it.

    Attributes:
      step: Number of the step, from 1.
      loss: Loss of the step.
      median: Median of the losses before.
      num_mads: Distance of the loss from the median, in MADs.
      is_first: Whether the step before was none.
    """

    step: int
    loss: float
    median: float
    num_mads: float
    is_first: bool

    def __str__(self) -> str:
        """A sentence with its numbers."""
        above = f"{self.num_mads:.0f} MADs above the median of the losses before, {self.median:.4g}"
        return f"step {self.step}: the loss jumps to {self.loss:.4g}, {above}"


@dataclass(frozen=True)
class SpikeRule:
    """The rule by which a loss is a spike.

    Attributes:
      window: Number of finite losses that it is compared with.
      least: Number of losses without which nothing is a spike: a run begins with few.
      num_mads: Distance from the median, in MADs, above which a loss is a spike.
      floor: Least MAD as a fraction of the median: a constant loss has none.
    """

    window: int = 100
    least: int = 50
    num_mads: float = 20.0
    floor: float = 0.005

    def level(self, losses: Sequence[float]) -> tuple[float, float]:
        """The median of losses, and their MAD, which is at least the floor."""
        median = statistics.median(losses)
        mad = statistics.median(abs(x - median) for x in losses)
        return median, max(mad, self.floor * abs(median))

    def limit(self, losses: Sequence[float]) -> float:
        """The largest loss after these that is no spike, a number of float32; or infinity."""
        if len(losses) < self.least:
            return math.inf
        median, mad = self.level(losses)
        # In float32, as the devices have the loss: both compare the same numbers.
        return float(np.float32(median + self.num_mads * mad)) if mad > 0 else math.inf

    def window_at(self, losses: Losses, step: int) -> list[float]:
        """The losses with which the loss of a step is compared."""
        return [loss for number, loss in losses if number <= step - LAG][-self.window :]

    def limit_at(self, losses: Losses, step: int) -> float:
        """The limit of the loss of a step."""
        return self.limit(self.window_at(losses, step))


RULE = SpikeRule()


@dataclass(frozen=True)
class Spikes:
    """The spikes of a run, each found by the losses before it.

    Attributes:
      action: "warn", or "skip" to leave out their updates; None looks for none.
      rule: The rule by which a loss is one.
      rows: Command that prints the examples of a step, without its number; "" for none.
    """

    action: str | None
    rule: SpikeRule = RULE
    rows: str = ""

    @property
    def skips(self) -> bool:
        """Whether the updates of spikes are left out."""
        return self.action == "skip"

    def limits(self, losses: Losses, step: int) -> dict[str, float]:
        """Options of a step that leave out its update if its loss is a spike."""
        return {"loss_limit": self.rule.limit_at(losses, step)} if self.skips else {}

    def note(self, spike: Spike) -> str:
        """A sentence about the first of a row of spikes; "" about later ones."""
        if not spike.is_first:
            return ""
        action = "; its update is left out" if self.skips else ""
        rows = f"; its examples: {self.rows} {spike.step}" if self.rows else ""
        return f"{spike}{action}{rows}"

    def look(self, losses: Losses, step: int, loss: float) -> tuple[Losses, Spike | None]:
        """Adds the loss of the next step to the last losses; returns it too if it is a spike.

        Args:
          losses: The losses that the last call returned.
          step: Number of the step, from 1.
          loss: Loss of the step, which may be no number: then it is not added.
        """
        if self.action is None or not math.isfinite(loss):
            return losses, None
        rule = self.rule
        after = (*losses, (step, loss))[-rule.window - LAG :]
        if loss <= rule.limit_at(losses, step):
            return after, None
        last_step, last = losses[-1]
        is_first = last_step != step - 1 or last <= rule.limit_at(losses, last_step)
        median, mad = rule.level(rule.window_at(losses, step))
        return after, Spike(step, loss, median, (loss - median) / mad, is_first)
