"""How well the sealed predictions of `gpu.py` (gpu_predictions.toml) agree with what it measured.

Each prediction is an interval that its author believed to hold the measured value with 80 %. Of
good intervals 80 % do, and they are narrow. The interval score of Gneiting and Raftery (2007,
https://doi.org/10.1198/016214506000001437) judges both, here divided by the measured value: the
width of an interval, plus ten times the distance of a value outside. Lower is better.
"""

import re
import statistics
import tomllib
from dataclasses import dataclass
from pathlib import Path

from gpu_crew import Facts

SEALED = Path(__file__).with_name("gpu_predictions.toml")
OUTSIDE = 0.2  # The probability that a value lies outside of its interval.


@dataclass(frozen=True)
class Predicted:
    """A prediction, and the value that was measured.

    Attributes:
      name: Network, contender and figure.
      low: Lower end of the interval.
      high: Its upper end.
      measured: The measured value, in the same unit.
    """

    name: str
    low: float
    high: float
    measured: float

    @property
    def is_inside(self) -> bool:
        """Whether the interval holds the measured value."""
        return self.low <= self.measured <= self.high

    @property
    def score(self) -> float:
        """The interval score over the measured value."""
        missed = max(self.low - self.measured, self.measured - self.high, 0.0)
        return (self.high - self.low + 2 / OUTSIDE * missed) / self.measured

    def __str__(self) -> str:
        """One line of the table."""
        verdict = "inside" if self.is_inside else "OUTSIDE"
        interval = f"{self.low:g} to {self.high:g}"
        return f"{self.name:44} {interval:>16} {self.measured:10.3g}  {verdict}"


def figures(row: Facts) -> dict[str, float]:
    """The measured values of a contender, by the names that predictions give them."""
    if "median_seconds" not in row:
        return {}
    values = {
        "step_ms": row["median_seconds"] * 1e3,
        "mfu": row["mfu"],
        "peak_gib": row["peak_bytes"] and row["peak_bytes"] / 2**30,
    }
    if (speed := row.get("speed_over_by_hand")) and row["devices"] > 1:
        values["exposed"] = 1 - speed
    return {name: value for name, value in values.items() if value is not None}


def compare(measured: Facts, sealed: Path = SEALED) -> list[Predicted]:
    """Finds the predictions of what was measured: none on a GPU that nobody has predicted."""
    rows = {
        (job, contender): row
        for job, result in measured["results"].items()
        for contender, row in result["contenders"].items()
    }
    devices = max((row.get("devices", 1) for row in rows.values()), default=1)
    model = re.search(r"[A-Z]\d+", measured["device"] or "")
    predicted = tomllib.loads(sealed.read_text()).get(f"{model[0]}x{devices}" if model else "", {})
    return [
        Predicted(f"{job} {contender} {figure}", low, high, values[figure])
        for (job, contender), row in rows.items()
        for values in [figures(row)]
        for figure, (low, high) in predicted.get(job, {}).get(contender, {}).items()
        if figure in values
    ]


def table(predictions: list[Predicted]) -> str:
    """The predictions, a line for each, and their score."""
    if not predictions:
        return "no predictions were sealed for this GPU"
    inside = sum(each.is_inside for each in predictions)
    score = statistics.mean(each.score for each in predictions)
    summary = (
        f"sealed predictions: {inside} of {len(predictions)} inside their intervals of 80 %; "
        f"mean interval score {score:.2f} of the measured value"
    )
    return "\n".join([*map(str, predictions), summary])
