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
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LAG = 2  # steps from the last loss that a limit depends on, to the step that it is for
Losses = list[tuple[int, float]]  # of the last steps, each with its step


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


RULE = SpikeRule()


class Spikes:
    """The last losses of a run, and the spikes among them.

    Args:
      action: "warn", or "skip" to leave out their updates; None looks for none.
      rule: The rule by which a loss is one.
      rows: Command that prints the examples of a step, without its number; "" for none.
    """

    def __init__(self, action: str | None, rule: SpikeRule = RULE, *, rows: str = "") -> None:
        self._action = action
        self._rule = rule
        self._rows = rows
        self._recent: deque[tuple[int, float]] = deque(maxlen=rule.window + LAG)
        self._last = -1  # step of the last spike

    @property
    def skips(self) -> bool:
        """Whether the updates of spikes are left out."""
        return self._action == "skip"

    @property
    def kept(self) -> Losses:
        """The last losses, for a checkpoint."""
        return [*self._recent]

    def restore(self, kept: Iterable[Sequence[float]]) -> None:
        """Continues from the losses of a checkpoint, each a step and a loss."""
        self._last = -1
        self._recent.clear()
        self._recent.extend((int(step), loss) for step, loss in kept)

    def limits(self, step: int) -> dict[str, float]:
        """Options of a step that leave out its update if its loss is a spike."""
        return {"loss_limit": self._rule.limit(self._before(step))} if self.skips else {}

    def note(self, spike: Spike) -> str:
        """A sentence about the first of a row of spikes; "" about later ones."""
        if not spike.is_first:
            return ""
        action = "; its update is left out" if self.skips else ""
        rows = f"; its examples: {self._rows} {spike.step}" if self._rows else ""
        return f"{spike}{action}{rows}"

    def look(self, step: int, loss: float) -> Spike | None:
        """Takes the loss of the next step, which may be no number; returns it if it is a spike."""
        if self._action is None or not math.isfinite(loss):
            return None
        limit = self._rule.limit(self._before(step))
        self._recent.append((step, loss))
        if loss <= limit:
            return None
        median, mad = self._rule.level(self._before(step))
        is_first = self._last != step - 1
        self._last = step
        return Spike(step, loss, median, (loss - median) / mad, is_first)

    def _before(self, step: int) -> list[float]:
        losses = [loss for number, loss in self._recent if number <= step - LAG]
        return losses[-self._rule.window :]
