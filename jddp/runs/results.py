"""Reads runs from their directories, and the result of each by one metric.

    runs = [*map(read_run, find_runs([Path("runs")]))]
    metric = choose_metric(runs)
    results = [result_of(run, metric, "max") for run in runs]

`metrics.jsonl` and `config.yaml` are read, of running jobs too; nothing is run.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from jddp.config.files import flatten, read_yaml
from jddp.errors import UsageError
from jddp.trainer.reports.metrics_file import MetricsFile
from jddp.typing import JsonObject, Record

METRICS = ("accuracy", "loss")  # the first that has been recorded, if none is chosen
NO_METRICS = {"step", "examples"}  # numbers of an evaluation that are no results


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """What a run has left in its directory.

    Attributes:
      name: The directory of the run.
      settings: The config by dotted keys; {} for a run of `jddp.fit`.
      records: The records of training and evaluation, in order.
    """

    name: str
    settings: JsonObject
    records: tuple[Record, ...]

    @property
    def evaluations(self) -> list[Record]:
        """The records of evaluations."""
        return [x for x in self.records if x.get("split") == "eval"]

    @property
    def metrics(self) -> set[str]:
        """Names of the metrics that have been a number in an evaluation."""
        items = itertools.chain.from_iterable(x.items() for x in self.evaluations)
        return {name for name, x in items if isinstance(x, int | float)} - NO_METRICS


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of one run.

    Attributes:
      name: The directory of the run.
      settings: The config by dotted keys; {} for a run of `jddp.fit`.
      best: The best value of the metric in an evaluation; None without a number.
      step: The step of that evaluation.
      last: The last evaluation's value; None without a number.
      step_seconds: Median time of a step; None if no record has one.
    """

    name: str
    settings: JsonObject
    best: float | None
    step: int | None
    last: float | None
    step_seconds: float | None


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run directories among paths; of another folder those in it.

    Raises:
      UsageError: If a path holds no run.
    """
    found = list[Path]()
    for path in paths:
        inside = [path] if is_run(path) else sorted(filter(is_run, path.glob("*")))
        if not inside:
            raise UsageError(
                f"{path} holds no metrics.jsonl, and no run. Give the run.dir of runs."
            )
        found += inside
    return found


def is_run(path: Path) -> bool:
    """Whether a run has left records in a directory."""
    return (path / "metrics.jsonl").is_file()


def read_run(path: Path) -> RecordedRun:
    """Reads the config and the records of a run.

    Raises:
      ConfigError: If the config cannot be read.
      FileSystemError: If the records cannot be read.
    """
    records = MetricsFile(path / "metrics.jsonl", is_writer=False).read()
    config = path / "config.yaml"
    settings = flatten(read_yaml(config)) if config.exists() else {}
    return RecordedRun(str(path), settings, tuple(records))


def choose_metric(runs: Sequence[RecordedRun], metric: str | None = None) -> str:
    """The metric by which runs are compared: the given one, or that of `checkpoint.best_metric`.

    Without either it is accuracy or loss.

    Raises:
      UsageError: If no run has evaluations of it.
    """
    names = set[str]().union(*(run.metrics for run in runs))
    chosen = metric or runs[0].settings.get("checkpoint.best_metric")
    chosen = chosen or next((name for name in METRICS if name in names), None)
    if chosen not in names:
        raise UsageError(
            f"No evaluation of these runs has the metric {chosen!r}. They have "
            f"{', '.join(sorted(names)) or 'no evaluations'}."
        )
    return str(chosen)


def result_of(run: RecordedRun, metric: str, mode: str) -> RunResult:
    """The result of a run by its best evaluation; `mode` "max" or "min" is better."""
    sign = 1 if mode == "max" else -1
    found = [x for x in run.evaluations if isinstance(x.get(metric), int | float)]
    best = max(found, key=lambda x: sign * x[metric], default=None)
    seconds = [x["step_seconds"] for x in run.records if x.get("step_seconds") is not None]
    return RunResult(
        name=run.name,
        settings=run.settings,
        best=None if best is None else best[metric],
        step=None if best is None else best["step"],
        last=found[-1][metric] if found else None,
        step_seconds=statistics.median(seconds) if seconds else None,
    )
