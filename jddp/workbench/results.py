"""Reads runs from their directories, and the result of each by one metric.

    runs = read_runs(find_runs([Path("runs")]))
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
from jddp.ground.errors import UsageError
from jddp.ground.names import few
from jddp.ground.typing import JsonObject, Record
from jddp.trainer.reports.files import MetricsFile
from jddp.trainer.runs.saved import kept_of_data

METRICS = ("accuracy", "loss")  # the first that has been recorded, if none is chosen
NO_METRICS = {"step", "examples"}  # numbers of an evaluation that are no results


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """The records and settings of a run, read from its directory.

    Attributes:
      name: The directory, without the folders that all runs have in common.
      path: The whole directory.
      settings: The config by dotted keys, and the beginning of the digest of the data, if it is
        known; {} for a run of `jddp.fit`.
      records: The records of training and evaluation, in order.
    """

    name: str
    path: str
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
      name: The directory, without the folders that all runs have in common.
      path: The whole directory.
      settings: The config by dotted keys; {} for a run of `jddp.fit`.
      best: The best value of the metric in an evaluation; None without a number.
      step: The step of that evaluation.
      last: The last evaluation's value; None without a number.
      step_seconds: Median time of a step; None if no record has one.
    """

    name: str
    path: str
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
            raise UsageError(f"{path} holds no metrics.jsonl, and no run. Give a run.dir.")
        found += inside
    return found


def is_run(path: Path) -> bool:
    """Whether a run has left records in a directory."""
    return (path / "metrics.jsonl").is_file()


def read_runs(paths: Sequence[Path]) -> list[RecordedRun]:
    """Reads the configs and the records of runs.

    Raises:
      ConfigError: If a config cannot be read.
      FileSystemError: If records cannot be read.
    """
    names = _short_names(paths)
    return [_read_run(name, path) for name, path in zip(names, paths, strict=True)]


def _read_run(name: str, path: Path) -> RecordedRun:
    records = MetricsFile(path / "metrics.jsonl", is_writer=False).read()
    config = path / "config.yaml"
    settings = flatten(read_yaml(config)) if config.exists() else {}
    if settings and (digest := kept_of_data(path).get("sha256")):
        settings["data.sha256"] = digest[:12]
    return RecordedRun(name, str(path), settings, tuple(records))


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The paths without the folders above all of them; as they are, if there is only one."""
    above = [path.parents for path in paths]
    shared = [folder for folder in above[0] if all(folder in x for x in above)] if above else []
    if len(paths) == 1 or not shared:
        return [*map(str, paths)]
    return [str(path.relative_to(shared[0])) for path in paths]


def choose_metric(runs: Sequence[RecordedRun], metric: str | None = None) -> str:
    """The metric by which runs are compared: the given one, or their `checkpoint.best_metric`.

    Without either it is accuracy or loss, of language models loss: one that all runs have that have
    evaluations.

    Raises:
      UsageError: If there is none.
    """
    known = [run for run in runs if run.metrics]
    names = set[str]().union(*(run.metrics for run in known))
    if not names or (metric and metric not in names):
        raise UsageError(
            f"No evaluation of these runs has the metric {metric!r}. They have "
            f"{', '.join(sorted(names)) or 'no evaluations'}."
        )
    common = names.intersection(*(run.metrics for run in known))
    first = METRICS[::-1] if "perplexity" in common else METRICS  # of language models
    preferred = [runs[0].settings.get("checkpoint.best_metric"), *first]
    chosen = metric or next((name for name in preferred if name in common), None)
    if chosen is None:
        each = few([f"{run.name} ({', '.join(sorted(run.metrics))})" for run in known])
        raise UsageError(f"These runs have no accuracy or loss in common: {each}. Give --metric.")
    return str(chosen)


def result_of(run: RecordedRun, metric: str, mode: str) -> RunResult:
    """The result of a run by its best evaluation; `mode` "max" or "min" is better."""
    sign = 1 if mode == "max" else -1
    found = [x for x in run.evaluations if isinstance(x.get(metric), int | float)]
    best = max(found, key=lambda x: sign * x[metric], default=None)
    seconds = [x["step_seconds"] for x in run.records if x.get("step_seconds") is not None]
    return RunResult(
        name=run.name,
        path=run.path,
        settings=run.settings,
        best=None if best is None else best[metric],
        step=None if best is None else best["step"],
        last=found[-1][metric] if found else None,
        step_seconds=statistics.median(seconds) if seconds else None,
    )
