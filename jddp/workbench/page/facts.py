"""Facts about a run, read from its directory; a part that cannot be read is named instead.

    facts = read_facts(Path("runs/one"))
    facts.best, facts.goodput, facts.missing

Nothing is run: a run that is running, one that has failed, and one of another version have facts
too.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from jddp.checkpoint.folders import finished
from jddp.config.files import flatten, read_yaml
from jddp.distributed.failure_file import headline, read_failure
from jddp.ground.errors import Error, words_of
from jddp.ground.names import direction_of
from jddp.ground.typing import JsonObject
from jddp.trainer.reports.run_directory import holder_of
from jddp.workbench.charts import At
from jddp.workbench.page.examples import TestAnswers
from jddp.workbench.page.records import History, Records, read_history, read_records
from jddp.workbench.pages import is_matrix

T = TypeVar("T")
METRICS = ("accuracy", "loss")  # the first that has been recorded, if none is chosen


@dataclass(frozen=True)
class Facts:
    """Facts about a run.

    Attributes:
      name: The directory of the run, or its URL.
      records: The records, as curves.
      history: Starts and events, from its events.
      settings: The config by dotted keys; {} for a run of `jddp.fit` without one.
      manifest: Versions, data and world of its first start; {} if there is none.
      failure: The first failure in one line; "" if there is none.
      checkpoints: Steps of its checkpoints, by folder.
      buckets: Buckets that a step sends, as the newest checkpoint lists them; [] without a list.
      holder: The process that is writing here; "" for a run that has ended.
      examples: What the model does with test examples; None if it was not run.
      missing: Parts that are missing or cannot be read, each with the reason.
    """

    name: str
    records: Records
    history: History
    settings: JsonObject
    manifest: JsonObject
    failure: str
    checkpoints: dict[str, list[int]]
    buckets: list[JsonObject]
    holder: str
    missing: tuple[str, ...]
    examples: TestAnswers | None = None

    @property
    def metric(self) -> str | None:
        """The metric by which the run is judged: `checkpoint.best_metric`, or accuracy or loss."""
        names = (str(self.settings.get("checkpoint.best_metric")), *METRICS)
        return next((name for name in names if name in self.records.evaluations), None)

    @property
    def is_larger_better(self) -> bool:
        """Whether larger values of the metric are better."""
        return direction_of(self.metric or "loss") == "max"

    @property
    def best(self) -> At | None:
        """The best evaluation; None without one."""
        if self.metric is None:
            return None
        curve = self.records.evaluations[self.metric]
        return curve.largest if self.is_larger_better else curve.smallest

    @property
    def num_steps(self) -> int:
        """Number of steps of the whole run, as far as it is known."""
        return max(self.history.num_steps, self.records.last_step)

    @property
    def goodput(self) -> float | None:
        """The share of the running time that went into steps which were kept."""
        seconds = self.history.seconds
        return min(1.0, self.records.step_seconds / seconds) if seconds > 0 else None

    @property
    def waiting_share(self) -> float:
        """The share of a step's time in which it waits for data."""
        return self.records.data_wait_seconds / (self.records.step_seconds or 1)

    @cached_property
    def classes(self) -> list[str]:
        """Names of the classes; numbers if there are only as many as in a confusion matrix."""
        data = self.manifest.get("data")
        names = data.get("classes") if isinstance(data, dict) else None
        if isinstance(names, list) and names:
            return [str(name) for name in names]
        sizes = (len(x) for x in self.records.last_evaluation.values() if is_matrix(x))
        return [str(number) for number in range(next(sizes, 0))]


def read_facts(run_dir: Path, *, name: str = "", is_over: bool = False) -> Facts:
    """Reads what is there of a run directory.

    Args:
      run_dir: The directory, which another process may be writing.
      name: Name of the directory, such as the URL that it is a copy of; by default its path.
      is_over: Whether this process itself has just ended the run.
    """
    missing = list[str]()

    def read(file: str, reader: Callable[[Path], T], otherwise: T) -> T:
        try:
            return reader(run_dir / file)
        except FileNotFoundError:
            reason = "there is none"
        except OSError as error:
            reason = words_of(error)
        except (ValueError, TypeError, LookupError, RecursionError, Error) as error:
            reason = f"cannot be read: {error}"
        missing.append(f"{file}: {reason}")
        return otherwise

    return Facts(
        name=name or str(run_dir),
        records=read("metrics.jsonl", read_records, Records()),
        history=read("logs/events.jsonl", read_history, History()),
        settings=read("config.yaml", _settings, {}),
        manifest=read("manifest.json", _object, {}),
        failure="" if is_over else read("logs/failure.json", _failure, ""),
        checkpoints={name: _steps(run_dir / name) for name in ("checkpoints", "best")},
        buckets=_buckets(run_dir / "checkpoints"),
        holder="" if is_over else read("lock", holder_of, ""),
        missing=tuple(missing),
    )


def _settings(path: Path) -> JsonObject:
    """The config; {} for a run of `jddp.fit`, which has none."""
    return flatten(read_yaml(path)) if path.exists() else {}


def _object(path: Path) -> JsonObject:
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise ValueError("it holds no object")
    return found


def _failure(path: Path) -> str:
    found = read_failure(path)
    return headline(found) if found else ""


def _buckets(folder: Path) -> list[JsonObject]:
    """The buckets of the newest checkpoint; a run of an earlier version has none."""
    try:
        found = _object(folder / str(_steps(folder)[-1]) / "run.json")["buckets"]
        return [{"bytes": int(x["bytes"]), "paths": [*map(str, x["paths"])]} for x in found]
    except (OSError, ValueError, TypeError, LookupError, Error):
        return []


def _steps(folder: Path) -> list[int]:
    try:
        return finished(folder)
    except Error:
        return []
