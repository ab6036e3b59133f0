"""Callbacks, which are called with reduced values only.

Loss and metrics are the same number on every process, so a callback decides the same from them on
all processes, and none waits for another forever.
"""

import math
from collections.abc import Mapping
from typing import Any

from jddp.errors import ConfigError
from jddp.trainer.run import Run


class Callback:
    """Base class of callbacks; override the methods you need. Every process calls all of them."""

    def on_step(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Called after each optimizer step, `metrics["step"]`; `run.state` may be one ahead."""

    def on_eval(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation of `run.state`."""

    def on_save(self, run: Run) -> None:
        """Called when a checkpoint save has started; it completes in the background."""

    def on_end(self, run: Run) -> None:
        """Called once, after the last step, evaluation and checkpoint."""


class _Watching(Callback):
    """A callback on one metric of the evaluations, with the direction in which it improves."""

    def __init__(self, metric: str, mode: str) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f"mode {mode!r} is unknown. Choose 'min' or 'max'.")
        self._metric, self._sign = metric, 1.0 if mode == "max" else -1.0

    def _goodness(self, metrics: Mapping[str, Any]) -> float:
        """The value, with a sign that makes larger better; the least one if it is not a number."""
        if self._metric not in metrics:
            raise ConfigError(
                f"Evaluation has no metric {self._metric!r}; it has {sorted(metrics)}. "
                "Watch one of those."
            )
        value = metrics[self._metric]  # of a resumed run None, as JSON has no NaN
        return -math.inf if value is None or math.isnan(value) else self._sign * value


class EarlyStopping(_Watching):
    """Ends the run when a metric of the evaluation has stopped improving.

    Args:
      metric: Name of the metric.
      mode: "min" or "max", the better direction.
      patience: Number of evaluations without improvement that ends the run.
      min_delta: Smallest change that counts as an improvement.
    """

    def __init__(
        self, metric: str = "loss", *, mode: str = "min", patience: int = 3, min_delta: float = 0.0
    ) -> None:
        super().__init__(metric, mode)
        self._patience, self._min_delta = patience, min_delta

    def on_eval(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Counts evaluations since the best one, those before a resume included."""
        best, waited = -math.inf, 0
        for goodness in map(self._goodness, run.evaluations):
            is_better = goodness - best > self._min_delta
            best, waited = (goodness, 0) if is_better else (best, waited + 1)
        if waited >= self._patience:
            run.stop(f"{self._metric} has not improved for {waited} evaluations")


class KeepBest(_Watching):
    """Keeps the checkpoint with the best value of a metric, in `<run_dir>/best`.

    Args:
      metric: Name of the metric in the evaluation.
      mode: "min" or "max", the better direction.

    Attributes:
      step: Step of the best value that this object has seen, or None.
      best: Best value, or None.
    """

    def __init__(self, metric: str = "loss", *, mode: str = "min") -> None:
        super().__init__(metric, mode)
        self.step: int | None = None
        self.best: float | None = None

    def on_eval(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Saves the state if it is the best so far, evaluations before a resume included."""
        *before, now = map(self._goodness, run.evaluations)
        if now > max(before, default=-math.inf):
            self.step, self.best = run.step, metrics[self._metric]
            run.save("best")
