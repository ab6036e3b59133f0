"""The history of a run, from the log file of process 0: its starts, and what happened at a step.

    history = read_history(run_dir / "logs" / "process_0.log")
    history.starts[-1].last_step; history.events

The log of a long run has a line for each record, of which only the last one is looked at closely.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from jddp.html.charts import Mark

_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) (\w+) (.*)")
_STEP = re.compile(r"(?:step|eval) (\d{1,15})(?:/(\d{1,15}))?\b")
_BEGIN = re.compile(r"begins: process \d+ on (\S+)")
_RESUMED = re.compile(r"resumed from step (\d{1,15})")
_TRAIN = re.compile(rb".{23} INFO step \d+/\d+ ")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:: .*)?")  # in a traceback
MOST_EVENTS = 200  # of a kind
# What a note of a run is about, by its words.
_KINDS = {
    "resumed": re.compile(r"resumed from step"),
    "skipped": re.compile(r"step \d+ is skipped"),
    "signal": re.compile(r"SIG[A-Z0-9]+: "),
    "stopped": re.compile(r"stopped at step"),
    "spike": re.compile(r"the loss jumps to"),
}


@dataclass
class RunStart:
    """A start of a run, up to the last line that it wrote.

    Attributes:
      began: Time of its first line.
      ended: Time of its last line.
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
        """Time between its first line and its last one."""
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

    def add(self, text: str) -> None:
        """Adds a line of the file; lines without a time are those of a traceback."""
        found = _LINE.fullmatch(text)
        if found is None:
            self.error = text if self.error and _EXCEPTION.fullmatch(text) else self.error
            return
        at = datetime.fromisoformat(f"{found[1]}.{found[2]}")
        level, words = found[3], found[4]
        self.error = "an exception" if words == "ended by:" else ""
        begin = _BEGIN.match(words)
        if begin or not self.starts:
            self.starts.append(RunStart(at, at, begin[1] if begin else ""))
        start = self.starts[-1]
        self._step(start, at, words)
        start.ended = at
        self._event(start, level, words)

    def _step(self, start: RunStart, at: datetime, words: str) -> None:
        """Takes the step of a record, or of an evaluation."""
        if step := _STEP.match(words):
            is_evaluation = words.startswith("eval")
            if is_evaluation and start.last_step == int(step[1]):
                self.pause_seconds += (at - start.ended).total_seconds()
            start.last_step = max(start.last_step, int(step[1]))
            self.num_steps = int(step[2] or self.num_steps)
        elif resumed := _RESUMED.match(words):
            start.resumed_from = start.last_step = int(resumed[1])

    def _event(self, start: RunStart, level: str, words: str) -> None:
        kinds = [name for name, pattern in _KINDS.items() if pattern.search(words)]
        kind = "warning" if level in ("WARNING", "ERROR", "CRITICAL") else next(iter(kinds), None)
        events = self.events.setdefault(kind, []) if kind else []
        named = re.match(r"step (\d{1,15})[ :]", words)
        events.append(Mark(int(named[1]) if named else start.last_step, words[:300]))
        del events[:-MOST_EVENTS]


def read_history(path: Path) -> History:
    """Reads the log file of a process.

    Raises:
      OSError: If it cannot be read.
    """
    history = History()
    with path.open("rb") as file:
        for line in _notable(file):
            history.add(line.decode(errors="replace").rstrip("\n"))
    return history


def _notable(lines: Iterable[bytes]) -> Iterator[bytes]:
    """All lines, but of several train records in a row only the first and the last."""
    waiting = b""
    is_first = True
    for line in lines:
        if _TRAIN.match(line) and not is_first:
            waiting = line
            continue
        if waiting:
            yield waiting
            waiting = b""
        yield line
        is_first = False
    if waiting:
        yield waiting
