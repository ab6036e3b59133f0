"""A config as an objective of Optuna, with one trial for all processes of a job.

    def suggest(trial):
        return {"optimizer.learning_rate": trial.suggest_float("rate", 1e-4, 1e-1, log=True)}

    study = optuna.create_study(direction="maximize")
    study.optimize(objective("a.yaml", suggest, metric="accuracy"), n_trials=20)

In a job of several processes the study of process 0 suggests values and decides about pruning. All
train with the same values, and stop at the same evaluation.
"""

import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jddp.checkpoint.storage import local_copy
from jddp.config.files import load_config, read_yaml, with_overrides
from jddp.config.schema import Config
from jddp.distributed.coordination import from_first, num_processes, process_index
from jddp.distributed.identity import resolve_identity
from jddp.ground.errors import ConfigError, NumericsError, UsageError
from jddp.ground.names import direction_of
from jddp.ground.typing import JsonObject, Settings
from jddp.trainer.job.build import join, train
from jddp.trainer.reports.run_directory import compare_keys
from jddp.trainer.run import Run
from jddp.trainer.watching import Watching

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

PRUNED = "the study prunes this trial"
SECONDS = 3600.0  # Limit for the study of process 0 to suggest values, or to decide.


def objective(
    config: Config | str | Path,
    suggest: "Callable[[Trial], Settings]",
    *,
    metric: str,
    **overrides: Any,
) -> "Objective":
    """Returns an objective for `study.optimize`, which trains a config with suggested values.

    A trial reports each evaluation to the study, which may prune it, and returns the best one. A
    trial whose loss is not finite fails, and the study continues with the next one.

    Args:
      config: A config, a YAML file or the name of a preset.
      suggest: Function of an `optuna.Trial` that returns values by dotted keys.
      metric: Metric of the evaluations.
      **overrides: Other keys of all trials, as for `jddp.train`.

    Returns:
      The objective. Trial 3 of a study leaves its files in RUN.DIR/STUDY/trial-3, which is also its
      user attribute "run_dir"; a `Config` without `run.dir` leaves nothing.

    Raises:
      ConfigError: If a key or value of the config is wrong.
    """
    if isinstance(config, Config):
        return Objective(with_overrides(config, overrides), suggest, metric)
    return Objective(load_config([str(config)], overrides)[0], suggest, metric)


class _Values(NamedTuple):
    """A trial, as all processes know it: its keys, its folder and its mode."""

    keys: JsonObject
    run_dir: str | None
    mode: str


@dataclass(frozen=True)
class Objective:
    """An objective of Optuna: called with a trial, it trains and returns the value of a metric.

    Attributes:
      config: Config of all trials.
      suggest: Function from a trial to values by dotted keys.
      metric: Metric of the evaluations.
    """

    config: Config
    suggest: "Callable[[Trial], Settings]"
    metric: str

    def __call__(self, trial: "Trial") -> float:
        """Trains with the values that a trial suggests; for a job of one process.

        Raises:
          UsageError: If this is one of several processes, or the study has another direction.
          ConfigError: If the folder of the trial holds a run with other values.
          KeyboardInterrupt: If a signal stops the run, which is saved.
          optuna.TrialPruned: If the study prunes the trial.
        """
        if max(resolve_identity().num_processes, num_processes()) > 1:
            raise UsageError(
                "This is one of several processes, and one study belongs to all of them: call "
                "objective.optimize(study, n_trials=...) on each, instead of study.optimize."
            )
        return self._lead(trial)

    def optimize(
        self, study: "Study", *, catch: tuple[type[Exception], ...] = (), **options: Any
    ) -> None:
        """Runs `study.optimize` for all processes of a job; every process calls this.

        Args:
          study: The study, on process 0; studies on other processes get no trials.
          catch: Exceptions of a trial after which the study continues.
          **options: Options of `study.optimize`, such as `n_trials` and `timeout`.

        Raises:
          UsageError: If the study has another direction.
          KeyboardInterrupt: If a signal stops a run, which is saved.
          TimeoutError: If the study of process 0 takes more than an hour to suggest values.
        """
        join(self.config, self.config.mesh.num_devices)
        if process_index() == 0:
            try:
                study.optimize(self._lead, catch=catch, **options)
            finally:
                _from_first(None)
            return
        while (values := _from_first(None)) is not None:
            with contextlib.suppress(*catch):
                self._train(values, None)

    def _lead(self, trial: "Trial") -> float:
        """Trains all processes with the values of a trial, on process 0."""
        import optuna

        values = self._values(trial)
        _from_first(values)
        run, best = self._train(values, trial)
        if run is not None and run.stopped == PRUNED:
            raise optuna.TrialPruned(f"at step {run.step}")
        return best

    def _values(self, trial: "Trial") -> _Values:
        keys = dict(self.suggest(trial))
        run_dir = self.config.run.dir
        if run_dir is not None:
            study = re.sub(r"[^\w.+-]+", "_", trial.study.study_name)
            run_dir = f"{run_dir}/{study}/trial-{trial.number}"
            trial.set_user_attr("run_dir", run_dir)
            path = local_copy(run_dir) / "config.yaml"
            now = with_overrides(self.config, keys).model_dump()
            # The run refuses keys with which it could not resume, and knows the keys of the data.
            if path.exists() and (others := compare_keys(read_yaml(path), now)[1]):
                raise ConfigError(f"{run_dir} has another trial: {others[0]}. Rename the study.")
        return _Values(keys, run_dir, self._mode(trial.study))

    def _mode(self, study: "Study") -> str:
        modes = {"MAXIMIZE": "max", "MINIMIZE": "min"}
        mode, *others = (modes[x.name] for x in study.directions)
        if others:
            raise UsageError(
                f"The study has {1 + len(others)} directions, and an objective of jddp returns one "
                f"value, {self.metric!r}. Create it with one direction."
            )
        if direction_of(self.metric) not in (None, mode):
            does, wants = ("minimizes", "maximize") if mode == "min" else ("maximizes", "minimize")
            raise UsageError(
                f"The study {does} {self.metric!r}, by whose name the opposite is better: "
                f"optuna.create_study(direction='{wants}')."
            )
        return mode

    def _train(self, values: _Values, trial: "Trial | None") -> tuple[Run | None, float]:
        """The run, and the best value of the metric; None and NaN if its numbers went wrong."""
        reports = _Reports(self.metric, values.mode, trial)
        config = with_overrides(self.config, {**values.keys, "run.dir": values.run_dir})
        try:
            run = train(config, callbacks=[reports])
        except NumericsError:
            return None, math.nan
        if run.interrupted is not None:
            raise KeyboardInterrupt(run.interrupted)
        best = reports.best_of(run)
        return run, math.nan if best is None else float(best[self.metric])


class _Reports(Watching):
    """Reports evaluations to a trial, which process 0 alone has, and stops the run if it is pruned.

    All processes stop it at the evaluation that decided: the run ends as one of a single process.
    """

    called = "objective(metric=)"

    def __init__(self, metric: str, mode: str, trial: "Trial | None") -> None:
        super().__init__(metric, mode)
        self._trial = trial

    def on_eval(self, run: Run, metrics: Mapping[str, float]) -> None:
        is_pruned = False
        if self._trial is not None:
            self._trial.report(self._sign * self._goodness(metrics), run.step)
            is_pruned = bool(self._trial.should_prune())  # MedianPruner returns a NumPy bool.
        mine = json.dumps(is_pruned)
        if json.loads(from_first("objective/pruned", mine, timeout_seconds=SECONDS)):
            run.stop(PRUNED)


def _from_first(values: _Values | None) -> _Values | None:
    """The values of process 0, on every process; None after the last trial."""
    found = json.loads(from_first("objective", json.dumps(values), timeout_seconds=SECONDS))
    return None if found is None else _Values(*found)
