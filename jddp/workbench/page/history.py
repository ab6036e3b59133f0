"""The history of a run, from the events of process 0: its starts, and what happened at a step.

history = read_history(run_dir / "logs" / "events.jsonl")
history.starts[-1].last_step; history.events
"""

import json
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from jddp.typing import JsonObject
from jddp.workbench.charts import Mark

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

    @property
    def lost_steps(self) -> int:
        """Steps that were taken again, because a start had not saved them."""
        pairs = zip(self.starts, self.starts[1:], strict=False)
        return sum(max(0, one.last_step - other.resumed_from) for one, other in pairs)

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
