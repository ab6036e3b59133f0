"""The records of a run as curves, and its events, each read in one pass.

    records = read_records(run_dir / "metrics.jsonl")
    records.train["loss"].values; records.evaluations["accuracy"].largest
    history = read_history(run_dir / "logs" / "events.jsonl")

A million records take a few seconds. Lines that are no records are counted. Numbers that are not
finite are left out of their curve.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from jddp.ground.typing import JsonObject
from jddp.workbench.charts import Mark, Thinned, is_drawable

MOST_TEXTS = 64  # of a name: of more, every second one is dropped
_MOST_STEPS = 2**53
_NO_CURVES = {"step", "split", "count", "examples", "predicted_memory_bytes"}
_NO_CURVES |= {"slowest_process", "slowest_ratio"}  # of earlier versions


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
      texts: Texts that callbacks have logged, by name and step; of very many some.
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
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    step = record.get("step")
    return record if type(step) is int and 0 <= step < _MOST_STEPS else None


def _add_to(curves: dict[str, Thinned], record: Mapping[str, object]) -> None:
    """Adds the numbers of a record; also None, which stands for a number that is not finite."""
    step = record["step"]
    assert isinstance(step, int)
    for name, value in record.items():
        if name in _NO_CURVES or not (value is None or isinstance(value, int | float)):
            continue
        if name not in curves:
            curves[name] = Thinned()
        curves[name].add(step, value)


MOST_EVENTS = 200  # of a kind
PLAIN = ("begin", "step", "eval", "failed")  # kinds that leave no mark


@dataclass
class RunStart:
    """A start of a run, up to the last event that it wrote.

    Attributes:
      began: Time of its first event.
      ended: Time of its last event.
      host: Name of its host; "" if it is not known.
      resumed_from: Step from which it resumed; 0 if from the beginning.
      last_step: The last step that it reported.
    """

    began: datetime
    ended: datetime
    host: str = ""
    resumed_from: int = 0
    last_step: int = 0

    @property
    def seconds(self) -> float:
        """Time between its first event and its last one."""
        return (self.ended - self.began).total_seconds()


@dataclass
class History:
    """The history of a run.

    Attributes:
      starts: The starts, in order.
      events: What happened, by kind; the last 200 of each.
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

    def add(self, event: JsonObject) -> None:
        """Adds an event."""
        at, kind = datetime.fromisoformat(event["time"]), event["kind"]
        if kind == "begin" or not self.starts:
            self.starts.append(RunStart(at, at, event.get("host", "")))
        start = self.starts[-1]
        step = event.get("step", start.last_step)
        if kind == "resumed":
            start.resumed_from = start.last_step = step
        elif kind == "eval" and start.last_step == step:
            self.pause_seconds += (at - start.ended).total_seconds()
        elif kind in ("step", "eval"):
            start.last_step = max(start.last_step, step)
        start.ended = at
        self.num_steps = event.get("num_steps", self.num_steps)
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
