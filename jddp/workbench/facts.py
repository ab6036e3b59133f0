"""Facts about a run, read from its directory; a part that cannot be read is named instead.

    facts = read_facts(Path("runs/one"))
    facts.best, facts.goodput, facts.missing

Nothing is run: a run that is running, one that has failed, and one of another version have facts
too.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

from jddp.checkpoint.folders import finished
from jddp.config.files import flatten, read_yaml
from jddp.distributed.failure_file import headline, read_failure
from jddp.ground.errors import Error, words_of
from jddp.ground.names import direction_of
from jddp.ground.typing import JsonObject
from jddp.trainer.reports.files import record_in
from jddp.trainer.reports.run_directory import holder_of
from jddp.workbench.charts import At, Mark, Thinned, is_drawable
from jddp.workbench.pages import is_matrix

MOST_TEXTS = 64  # Maximum number of texts of a name; of more texts every second one is dropped.
_MOST_STEPS = 2**53
_NO_CURVES = {"step", "split", "count", "examples", "predicted_memory_bytes"}


@dataclass
class Records:
    """The contents of a run's records.

    Attributes:
      train: Curves of the train records, by name.
      evaluations: Curves of the evaluations, by name.
      num_train: Number of train records.
      num_evaluations: Number of evaluations.
      last_train: The last train record; {} before the first.
      last_evaluation: The last evaluation, with its arrays; {} before the first.
      step_seconds: Time in steps, after the first record or resume.
      data_wait_seconds: The part of it in which they waited for data.
      texts: Texts that callbacks have logged, by name and step; not all, if there are very many.
      num_strange: Number of lines that are no records.
    """

    train: dict[str, Thinned] = field(default_factory=dict)
    evaluations: dict[str, Thinned] = field(default_factory=dict)
    num_train: int = 0
    num_evaluations: int = 0
    last_train: JsonObject = field(default_factory=dict)
    last_evaluation: JsonObject = field(default_factory=dict)
    step_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    texts: dict[str, dict[int, str]] = field(default_factory=dict)
    num_strange: int = 0

    @property
    def last_step(self) -> int:
        """The step of the newest record; 0 before the first."""
        return max(x.get("step", 0) for x in (self.last_train, self.last_evaluation))

    @property
    def num_examples(self) -> int:
        """Examples of the last evaluation; 1 if it is not known."""
        found = self.last_evaluation.get("examples")
        return max(1, int(found)) if is_drawable(found) else 1

    def last(self, name: str) -> float:
        """The last value of a name in the train records; 0 if there is none that is finite."""
        return (self.train[name].last or 0.0) if name in self.train else 0.0

    def add(self, line: bytes) -> None:
        """Adds a line of the file."""
        record = _record(line)
        if record is None:
            self.num_strange += 1
        elif (split := record.get("split")) == "eval":
            self.num_evaluations += 1
            self.last_evaluation = record
            _add_to(self.evaluations, record)
        elif split == "train":
            self._add_times(record)
            self.num_train += 1
            self.last_train = record
            _add_to(self.train, record)
        elif split == "callback":
            self._add_texts(record)

    def _add_times(self, record: JsonObject) -> None:
        num_steps = record["step"] - self.last_train.get("step", 0)
        seconds, waited = (
            x if is_drawable(x := record.get(name)) else 0.0
            for name in ("step_seconds", "data_wait_seconds")
        )
        if num_steps > 0:
            self.step_seconds += num_steps * seconds
            self.data_wait_seconds += num_steps * waited

    def _add_texts(self, record: JsonObject) -> None:
        for name, text in record.items():
            if name == "split" or not isinstance(text, str):
                continue
            kept = self.texts.setdefault(name, {})
            kept[record["step"]] = text
            if len(kept) > MOST_TEXTS:
                self.texts[name] = dict([*kept.items()][::2])


def read_records(path: Path) -> Records:
    """Reads a file of records; a process may still be writing its last line.

    Raises:
      OSError: If it cannot be read.
    """
    records = Records()
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") or _record(line):
                records.add(line)
    for curve in (*records.train.values(), *records.evaluations.values()):
        curve.finish()
    return records


def _record(line: bytes) -> JsonObject | None:
    record = record_in(line)
    return record if record and 0 <= record["step"] < _MOST_STEPS else None


def _add_to(curves: dict[str, Thinned], record: Mapping[str, object]) -> None:
    """Adds the numbers of a record; also None, which stands for a number that is not finite."""
    step = record["step"]
    assert isinstance(step, int)
    for name, value in record.items():
        if name in _NO_CURVES or not (value is None or isinstance(value, int | float)):
            continue
        curves.setdefault(name, Thinned()).add(step, value)


MOST_EVENTS = 200  # Maximum number of events of a kind.
PLAIN = ("begin", "first step", "step", "eval", "failed")  # Kinds that leave no mark.


@dataclass
class RunStart:
    """A start of a run, up to the last event that it wrote.

    Attributes:
      began: Time of its first event.
      ended: Time of its last event.
      host: Name of its host; "" if it is not known.
      resumed_from: Step from which it resumed; 0 if from the beginning.
      start_seconds: Time from its fork by a spare to the restore; 0 if no spare has forked it.
      restore_seconds: Time to restore the checkpoint, before its first event.
      stepped: Time of its first report of a step; None before.
      reported: Time of its last report of a step, or of an evaluation; None before.
      last_step: The last step that it reported.
      is_in_order: Whether it took all steps, or a signal or a callback has stopped it.
    """

    began: datetime
    ended: datetime
    host: str = ""
    resumed_from: int = 0
    start_seconds: float = 0.0
    restore_seconds: float = 0.0
    stepped: datetime | None = None
    reported: datetime | None = None
    last_step: int = 0
    is_in_order: bool = False

    @property
    def seconds(self) -> float:
        """Time between its first event and its last one."""
        return (self.ended - self.began).total_seconds()


class FailureCost(NamedTuple):
    """The cost of a failure after which the run was started again, or of several; zeros for none.

    Attributes:
      lost_steps: Number of steps that were taken again, as far as they were reported.
      lost_seconds: Time that these steps had taken.
      down_seconds: Time from the last report of a step before the failure until the next start.
      start_seconds: Time from there until the restore, of a process that a spare has forked.
      restore_seconds: Time to restore the checkpoint.
      step_seconds: Time from then until the first step, or the last event of a start without one.
    """

    lost_steps: int = 0
    lost_seconds: float = 0.0
    down_seconds: float = 0.0
    start_seconds: float = 0.0
    restore_seconds: float = 0.0
    step_seconds: float = 0.0

    @property
    def pause_seconds(self) -> float:
        """Time from the last report before the failure to the first step after it."""
        return sum(self[2:])


def cost_between(before: RunStart, after: RunStart) -> FailureCost:
    """The cost of the failure between two starts; zeros if the first one has ended in order."""
    lost_steps = max(0, before.last_step - after.resumed_from)
    if before.is_in_order and not lost_steps:
        return FailureCost()
    # The first step is compiled, so the time of a step is the mean of the steps after it.
    end = before.reported or before.ended
    stepping = (end - (before.stepped or end)).total_seconds()
    num_steps = max(1, before.last_step - before.resumed_from - 1)
    lost_seconds = lost_steps * stepping / num_steps
    gap = max(0.0, (after.began - end).total_seconds())
    restore = min(gap, after.restore_seconds)
    start = min(gap - restore, after.start_seconds)
    first_step = ((after.stepped or after.ended) - after.began).total_seconds()
    return FailureCost(lost_steps, lost_seconds, gap - start - restore, start, restore, first_step)


@dataclass
class History:
    """The history of a run.

    Attributes:
      starts: The starts, in order.
      events: Events by kind; the last 200 of each.
      num_steps: Number of steps of the whole run; 0 if it is not known.
      pause_seconds: Time between the last step before an evaluation and its result.
      error: The exception that ended the last start; "" if none did.
    """

    starts: list[RunStart] = field(default_factory=list)
    events: dict[str, list[Mark]] = field(default_factory=dict)
    num_steps: int = 0
    pause_seconds: float = 0.0
    error: str = ""

    @property
    def seconds(self) -> float:
        """Time in which the run was running."""
        return sum(start.seconds for start in self.starts)

    @property
    def costs(self) -> list[FailureCost]:
        """For each start after the first, the cost of a failure before it."""
        return [cost_between(before, after) for before, after in pairwise(self.starts)]

    @property
    def cost(self) -> FailureCost:
        """The cost of all failures: the sum of each field."""
        return FailureCost(*map(sum, zip(*self.costs, strict=True)))

    def add(self, event: JsonObject) -> None:
        """Adds an event."""
        at, kind = datetime.fromisoformat(event["time"]), event["kind"]
        if kind == "begin" or not self.starts:
            self.starts.append(RunStart(at, at, event.get("host", "")))
        start = self.starts[-1]
        step = event.get("step", start.last_step)
        if kind == "resumed":
            start.resumed_from = start.last_step = step
            start.start_seconds = float(event.get("start_seconds", 0.0))
            start.restore_seconds = float(event.get("restore_seconds", 0.0))
        elif kind in ("first step", "step", "eval"):
            if kind == "eval" and start.last_step == step:
                self.pause_seconds += (at - start.ended).total_seconds()
            if step > start.resumed_from:
                start.stepped, start.reported = start.stepped or at, at
            start.last_step = max(start.last_step, step)
        start.ended = at
        self.num_steps = event.get("num_steps", self.num_steps)
        is_done = 0 < self.num_steps <= start.last_step or kind in ("signal", "stopped")
        start.is_in_order = (is_done or start.is_in_order) and kind != "failed"
        self.error = event.get("error", "")
        if kind not in PLAIN:
            marks = self.events.setdefault(kind, [])
            marks.append(Mark(step, event["text"][:300]))
            del marks[:-MOST_EVENTS]


def read_history(path: Path) -> History:
    """Reads the events of a run.

    Raises:
      OSError: If the file cannot be read.
      ValueError: If a line before the last is not an event.
    """
    history = History()
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.endswith("\n"):  # A process may have died in the middle of the last one.
                history.add(json.loads(line))
    return history


T = TypeVar("T")
METRICS = ("accuracy", "loss")  # The default is the first metric that has been recorded.


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
      holder: The process that is writing here; "" for a run that has ended.
      missing: Parts that are missing or cannot be read, each with the reason.
    """

    name: str
    records: Records
    history: History
    settings: JsonObject
    manifest: JsonObject
    failure: str
    checkpoints: dict[str, list[int]]
    holder: str
    missing: tuple[str, ...]

    @property
    def metric(self) -> str | None:
        """The metric by which the run is judged: `checkpoint.best_metric`, or accuracy or loss."""
        names = (str(self.settings.get("checkpoint.best_metric")), *METRICS)
        return next((name for name in names if name in self.records.evaluations), None)

    @property
    def best(self) -> At | None:
        """The best evaluation; None without one."""
        if self.metric is None:
            return None
        curve = self.records.evaluations[self.metric]
        return curve.largest if direction_of(self.metric) == "max" else curve.smallest

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
    """Reads the facts that a run directory holds.

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


def _steps(folder: Path) -> list[int]:
    try:
        return finished(folder)
    except Error:
        return []
