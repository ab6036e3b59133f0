"""`jddp compare RUN...`: which run is better, by how much, and what differs?

    print(compare_runs(read_runs([Path("runs/a"), Path("runs/b")])))

A RUN is a run directory, or a folder of them. Their records and configs are read, and nothing runs.

Runs that differ by the seed alone are a group, with a mean and a spread: their settings are the
same, and their data by a digest. Of several runs of one seed the last one counts.
"""

import dataclasses
import itertools
import math
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from json import dumps
from pathlib import Path

from jddp.config.cli import Parser
from jddp.config.files import flatten, read_yaml
from jddp.config.schema import effect_of
from jddp.distributed.command import run_command
from jddp.ground.errors import UsageError, show
from jddp.ground.files import expand
from jddp.ground.names import MODES, choose_mode, few
from jddp.ground.typing import JsonObject, Record
from jddp.trainer.reports.files import MetricsFile
from jddp.trainer.reports.lines import COLUMNS
from jddp.trainer.runs.opened import kept_of_data

METRICS = ("accuracy", "loss")  # The default is the first metric that has been recorded.
NO_METRICS = {"step", "examples"}  # Numbers of an evaluation that are no results.
NO_SETTINGS = {"seed", "run.dir"}
MOST_KEYS = 3  # Maximum number of keys that the verdict names.
CLEAR = 2.0  # A difference of more standard errors is no chance.


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
    """The run directories among paths, and the run directories in other folders.

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

    Without either it is accuracy or loss, and loss for language models: a metric of all runs that
    have evaluations.

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
    first = METRICS[::-1] if "perplexity" in common else METRICS  # language models: loss first
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


@dataclasses.dataclass(frozen=True)
class Seeds:
    """Runs that differ by the seed alone.

    Attributes:
      results: The runs.
    """

    results: tuple[RunResult, ...]

    @property
    def values(self) -> tuple[float, ...]:
        """For each seed the metric of the best evaluation of its last run that has a number."""
        found = {x.settings.get("seed"): x.best for x in self.results if x.best is not None}
        return tuple(found.values())

    @property
    def name(self) -> str:
        """The name of the run; or what the names have in common, and the number of seeds."""
        names = [x.name for x in self.results]
        num = len({x.settings.get("seed") for x in self.results})
        return names[0] if len(names) == 1 else f"{_pattern(names)} ({num} seed{'s' * (num > 1)})"

    @property
    def mean(self) -> float:
        """Mean of the values; NaN without any."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def variance(self) -> float | None:
        """Variance of the mean, from the spread over seeds; None for fewer than two."""
        num = len(self.values)
        return statistics.variance(self.values) / num if num > 1 else None

    @property
    def step_seconds(self) -> float | None:
        """Mean time of a step; None if no run has one."""
        known = [x.step_seconds for x in self.results if x.step_seconds is not None]
        return statistics.fmean(known) if known else None


@dataclasses.dataclass(frozen=True)
class ComparedRuns:
    """Groups of runs, the best first; its `str` is a table with a verdict above it.

    Attributes:
      metric: The metric by which runs are compared.
      mode: The better end of the metric, "max" or "min".
      groups: The groups.
    """

    metric: str
    mode: str
    groups: tuple[Seeds, ...]

    @property
    def verdict(self) -> str:
        """The better group, by how much, at which cost, and what differs, in a few sentences."""
        first, *others = self.groups
        if not first.values:
            return f"No evaluation of these runs has a number for {self.metric!r}."
        if not others or not others[0].values:
            return f"{self.metric} is {with_error(first.mean, first.variance)}: {first.name}."
        second = others[0]
        difference = abs(first.mean - second.mean)
        if first.mean == second.mean:
            said = f"{first.name} and {second.name} are equal: {self.metric} is {first.mean:.4g}"
        elif first.variance is None or second.variance is None:
            said = f"{first.name} is better than {second.name} by {difference:.2g} {self.metric}; "
            said += "one seed does not show how much of that is chance"
        else:
            error = math.sqrt(first.variance + second.variance)
            by = f"{with_error(difference, error**2)} {self.metric}"
            said = f"{first.name} is better than {second.name} by {by}"
            if difference <= CLEAR * error:
                said = f"{first.name} and {second.name} are equal within their spread: "
                said += f"they differ by {by}"
        return ". ".join([said, *self._costs(first, second)]) + "."

    def _costs(self, first: Seeds, second: Seeds) -> list[str]:
        """Sentences on time and settings."""
        costs = list[str]()
        if first.step_seconds and second.step_seconds:
            ratio = first.step_seconds / second.step_seconds
            costs.append(f"Steps of the first take {ratio:.2f} times as long")
        keys = differing([first.results[0], second.results[0]])
        if keys:
            more = f" and {len(keys) - MOST_KEYS} more keys" if len(keys) > MOST_KEYS else ""
            costs.append(f"They differ in {', '.join(keys[:MOST_KEYS])}{more}")
        return costs

    def as_json(self) -> JsonObject:
        """Verdict and runs as values of JSON."""
        return {
            "verdict": self.verdict,
            "metric": self.metric,
            "mode": self.mode,
            "differing": differing(self.results),
            "groups": [
                {"mean": None if math.isnan(x.mean) else x.mean, **dataclasses.asdict(x)}
                for x in self.groups
            ],
        }

    @property
    def results(self) -> list[RunResult]:
        """The results of all runs, the best group first."""
        return [*itertools.chain.from_iterable(group.results for group in self.groups)]

    def __str__(self) -> str:
        """The verdict, and a row for each run with the settings in which it differs below."""
        keys = ["seed", *differing(self.results)]
        width = max(3, *(len(x.name) for x in self.results))
        lines = textwrap.wrap(self.verdict, COLUMNS - 1, break_on_hyphens=False)
        lines += ["", f"{'run':<{width}}  {self.metric:>10}     step      last   step s"]
        for group in self.groups:
            lines += _rows(group, keys, width)
        return "\n".join(lines)


def compare_runs(
    runs: Sequence[RecordedRun], metric: str | None = None, mode: str = "auto"
) -> ComparedRuns:
    """Compares runs by their best evaluations.

    Args:
      runs: Records of the runs.
      metric: Metric of the evaluations; by default the `checkpoint.best_metric`, or else
        accuracy or loss, if all runs have it.
      mode: Whether "max" or "min" is better; "auto" goes by the metric's name.

    Raises:
      UsageError: If no run has evaluations of the metric, or none is given and none in common.
      ConfigError: If it is not known whether "max" or "min" is better.
    """
    metric = choose_metric(runs, metric)
    mode = choose_mode(metric, mode, key="--mode")
    groups = dict[str, list[RunResult]]()
    for number, run in enumerate(runs):
        same = _identity(run.settings)
        key = str(sorted(same.items())) if same else f"run {number}"
        groups.setdefault(key, []).append(result_of(run, metric, mode))
    made = [Seeds(tuple(x)) for x in groups.values()]
    sign = 1 if mode == "max" else -1
    made.sort(key=lambda group: -sign * group.mean if group.values else math.inf)
    return ComparedRuns(metric, mode, tuple(made))


def differing(results: Sequence[RunResult]) -> list[str]:
    """The keys, other than the seed, whose values differ between runs."""
    known = [_identity(x.settings) for x in results if x.settings]
    keys = dict.fromkeys(itertools.chain(*known))
    return [k for k in keys if any(x.get(k) != known[0].get(k) for x in known)]


def _identity(settings: JsonObject) -> JsonObject:
    """The settings, without keys that make no other run; the data by their digest, if it is known.

    The same files may lie in another folder on another machine.
    """
    others = NO_SETTINGS | ({"data.dir"} if "data.sha256" in settings else set())
    return {k: x for k, x in settings.items() if k not in others and effect_of(k) != "none"}


def _pattern(names: Sequence[str]) -> str:
    """The first and the last characters that all names have, with "*" for the others."""
    first = _beginning(names)
    last = _beginning([name[len(first) :][::-1] for name in names])[::-1]
    return f"{first}*{last}"


def _beginning(texts: Sequence[str]) -> str:
    """The characters with which all texts begin."""
    each = zip(*texts, strict=False)
    return "".join(x[0] for x in itertools.takewhile(lambda x: len(set(x)) == 1, each))


def _rows(group: Seeds, keys: Sequence[str], width: int) -> Iterator[str]:
    for x in group.results:
        step = "-" if x.step is None else f"{x.step:,}"
        numbers = f"{cell(x.best):>10} {step:>8} {cell(x.last):>9}"
        yield f"{x.name:<{width}}  {numbers} {cell(x.step_seconds, digits=3):>8}"
        differs = "  ".join(f"{key}={x.settings[key]}" for key in keys if key in x.settings)
        yield from textwrap.wrap(differs, COLUMNS - 3, initial_indent="  ", subsequent_indent="  ")
    if group.variance is not None:
        mean = with_error(group.mean, group.variance)
        yield f"  mean of {len(group.values)} seeds: {mean} (standard error)"


def with_error(value: float, variance: float | None) -> str:
    """A value with its standard error, which is the root of a variance."""
    return f"{value:.4g}" if variance is None else f"{value:.4g} +- {math.sqrt(variance):.2g}"


def cell(value: float | None, digits: int = 4) -> str:
    """A number for a table."""
    return "-" if value is None else f"{value:.{digits}g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    description = "Compare runs by their best evaluations. Seeds of one config are one group."
    parser = Parser(prog="jddp compare", description=description)
    add = parser.add_argument
    add("runs", type=expand, nargs="+", metavar="RUN", help="run directory, or folder of runs")
    add("--metric", help="metric of the evaluations; by default checkpoint.best_metric")
    add("--mode", choices=MODES, default="auto", help="what is better; auto: by the name")
    add("--json", action="store_true", help="print one line of JSON instead")
    return run_command(lambda: _compare(**vars(parser.parse_args(argv))))


def _compare(*, runs: list[Path], metric: str | None, mode: str, json: bool) -> None:
    found = compare_runs(read_runs(find_runs(runs)), metric, mode)
    show(dumps(found.as_json()) if json else str(found))
