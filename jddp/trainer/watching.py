"""Callbacks that watch a metric of the evaluations: early stopping, and the best checkpoint.

Their decisions depend only on the records of all evaluations: they are the same on every process,
and in a resumed run.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jddp.ground.errors import ConfigError
from jddp.ground.names import choose_mode, did_you_mean
from jddp.ground.typing import JsonObject, Record
from jddp.trainer.run import Callback, Options, Run, check_counts
from jddp.trainer.saving import BEST

NOT_IMPROVED = "has not improved for"


class Watching(Callback):
    """A callback on one metric of the evaluations, with the direction in which it improves.

    Attributes:
      metric: Name of the metric.
    """

    called = "Watching"  # Name in errors, with the key of the config.

    def __init__(self, metric: str, mode: str) -> None:
        self.metric = metric
        self._sign = 1.0 if choose_mode(metric, mode, key="mode") == "max" else -1.0

    def check_options(self, options: Options) -> None:
        """Refuses a run in which there is nothing to watch.

        Args:
          options: Settings of the run.

        Raises:
          ConfigError: If there are no evaluations.
        """
        if options.evaluation.batches is None:
            raise ConfigError(f"{self.called} watches evaluations, but there is no evaluate=.")

    def check(self, names: Sequence[str]) -> None:
        """Refuses a metric that evaluations do not return.

        Args:
          names: Names of the values that they return.

        Raises:
          ConfigError: If the metric is not among them.
        """
        if self.metric not in names:
            listed = ", ".join(sorted(set(names) - {"examples"}))
            raise ConfigError(
                f"{self.called} watches {self.metric!r}, but evaluations return {listed}."
                f"{did_you_mean(self.metric, names)}"
            )

    def best_of(self, run: Run) -> Record | None:
        """The record of the best evaluation, also from before a resume; None without any."""
        best = max(run.evaluations, key=self._goodness, default=None)
        return None if best is None or self._goodness(best) == -math.inf else best

    def best_so_far(self, run: Run) -> str:
        """The best evaluation in a few words; "" without one."""
        if (best := self.best_of(run)) is None:
            return ""
        return f"best {self.metric} {best[self.metric]:.4g} at step {best['step']}"

    def conclusion(self, run: Run) -> str:
        """A line about the best evaluation of a run that has ended."""
        return self.best_so_far(run) or f"best {self.metric}: none"

    def _goodness(self, metrics: Record) -> float:
        """The value, signed so that larger is better; minus infinity if it is not a number."""
        # None in a resumed run, as JSON has no NaN; absent from evaluations before it was watched.
        value = metrics.get(self.metric)
        if isinstance(value, list):
            raise ConfigError(f"{self.called} watches {self.metric!r}, which is an array.")
        return -math.inf if value is None or math.isnan(value) else self._sign * value


class EarlyStopping(Watching):
    """Ends the run when a metric of the evaluation has stopped improving.

    Args:
      metric: Name of the metric.
      mode: "max" if larger values are better, "min" if smaller ones are. "auto" decides by the name
        of the metric: larger for accuracy, f1, auc and similar names, smaller for loss, error and
        similar names; for other names give the mode.
      patience: Number of evaluations without improvement that ends the run.
      min_delta: Smallest change that counts as an improvement.

    Attributes:
      settings: The arguments by name, the mode as "max" or "min".

    Raises:
      ConfigError: If the mode is unknown, or is "auto" and the name has no direction; or if a
        number breaks its rule.
    """

    called = "EarlyStopping"

    def __init__(
        self, metric: str = "loss", *, mode: str = "auto", patience: int = 3, min_delta: float = 0.0
    ) -> None:
        super().__init__(metric, mode)
        self.settings: JsonObject = {
            "metric": metric,
            "mode": choose_mode(metric, mode, key="mode"),
            "patience": patience,
            "min_delta": min_delta,
        }
        if patience < 1 or min_delta < 0:
            got = f"got {patience} and {min_delta}"
            raise ConfigError(
                f"EarlyStopping: patience is at least 1, min_delta at least 0; {got}."
            )

    def check_options(self, options: Options) -> None:
        """Refuses a run that is evaluated only at its end, when nothing is left to stop."""
        super().check_options(options)
        if options.eval_every_steps is None:
            raise ConfigError(
                f"{self.called} needs eval_every_steps= (train.eval_every_steps or _epochs): the "
                "run is evaluated only at its end."
            )

    def on_eval(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Counts evaluations since the best one, also before a resume."""
        if (reason := self.verdict(run)) is not None:
            run.stop(reason)

    def verdict(self, run: Run) -> str | None:
        """The reason to stop after the evaluations so far, or None."""
        best = -math.inf
        waited = 0
        for goodness in map(self._goodness, run.evaluations):
            waited += 1
            if goodness - best > self.settings["min_delta"]:
                best = goodness
                waited = 0
        is_over = waited >= self.settings["patience"]
        return f"{self.metric} {NOT_IMPROVED} {waited} evaluations" if is_over else None


class KeepBest(Watching):
    """Keeps the checkpoints with the best values of a metric, in `<run_dir>/best`.

    Args:
      metric: Name of the metric in the evaluation.
      mode: "max" if larger values are better, "min" if smaller ones are; "auto" as for
        `EarlyStopping`.
      keep: Number of checkpoints to keep.

    Raises:
      ConfigError: If the mode is unknown, or is "auto" and the name has no direction; or if `keep`
        is not positive.

    Attributes:
      step: Step of the best value, also before a resume; None before an evaluation.
      best: Best value, or None.
    """

    called = "KeepBest (checkpoint.best_metric)"

    def __init__(self, metric: str = "loss", *, mode: str = "auto", keep: int = 1) -> None:
        super().__init__(metric, mode)
        check_counts(keep=keep)
        self._keep = keep
        self.step: int | None = None
        self.best: float | None = None

    def check_options(self, options: Options) -> None:
        """Refuses a run that keeps nothing."""
        super().check_options(options)
        if options.run_dir is None:
            raise ConfigError(f"{self.called} needs run_dir=, to keep the best checkpoint there.")

    def on_begin(self, run: Run) -> None:
        """Saves the state from which the run resumes, if it is among the best and was not kept."""
        run.lost.discard(run.step)
        if run.step in self.steps(run) and f"{BEST}/{run.step}" not in run.checkpoints:
            run.save(BEST)

    def on_eval(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Saves the state if it is among the best of all evaluations, also from before a resume."""
        run.lost.discard(run.step)  # The run may have gone back and lost it.
        if (best := self.best_of(run)) is not None:
            self.step, self.best = best["step"], best[self.metric]
        if run.evaluations[-1]["step"] in self.steps(run):
            run.save(BEST)

    def steps(self, run: Run) -> list[int]:
        """The steps of the checkpoints that are kept, the best first; of equal ones the earlier."""
        there = [x for x in run.evaluations if x["step"] not in run.lost]
        ranked = sorted(there, key=self._goodness, reverse=True)[: self._keep]
        return [record["step"] for record in ranked if self._goodness(record) > -math.inf]

    def best_of(self, run: Run) -> Record | None:
        """The record of the best evaluation whose state is kept; None without any."""
        first = self.steps(run)[:1]
        return next((x for x in run.evaluations if x["step"] in first), None)

    def conclusion(self, run: Run) -> str:
        """A line about the best evaluation, and the place of its checkpoint."""
        line = super().conclusion(run)
        best = self.best_of(run)
        return line if best is None else f"{line}, in {run.run_dir}/best/{best['step']}"


def best_steps(run: Run, callbacks: Sequence[Callback]) -> list[int]:
    """The steps of the checkpoints that each `KeepBest` keeps, the best first."""
    return [x for each in callbacks if isinstance(each, KeepBest) for x in each.steps(run)]


def judge_again(run: Run, callbacks: Sequence[Callback]) -> bool:
    """Lets a restored run continue if early stopping had ended it, and would not end it now.

    Returns:
      Whether the run was stopped, and continues.
    """
    if run.stopped is None or NOT_IMPROVED not in run.stopped:
        return False
    verdicts = [each.verdict(run) for each in callbacks if isinstance(each, EarlyStopping)]
    run.progress = dataclasses.replace(run.progress, stopped=next(filter(None, verdicts), None))
    return run.stopped is None


def watching(callbacks: Sequence[Callback]) -> list[Watching]:
    """The callbacks that watch a metric; `KeepBest`, whose lines are longer, after the others."""
    found = [callback for callback in callbacks if isinstance(callback, Watching)]
    return sorted(found, key=lambda callback: isinstance(callback, KeepBest))
