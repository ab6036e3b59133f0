"""The progress of a run: live on a terminal and in a notebook, plain lines elsewhere.

    step 400/1170  loss 0.2384  accuracy 0.9123  10.8k images/s  MFU 41.2 %  ETA 0:18
    eval 400  loss 0.361  accuracy 0.869  examples 10000
    recall
    [0.81 0.93]

Text is as wide as the terminal, from 40 to 100 columns, and 80 in a file or a pipe. All lines go
into the process's log file. A notebook shows a bar and the newest lines in one element of static
HTML, which it keeps, also where it is saved, run without a browser, or exported.
"""

import contextlib
import logging
import math
import os
import shutil
import sys
import time
from html import escape
from typing import TYPE_CHECKING, TextIO

from jddp.ground.errors import printable_lines
from jddp.ground.typing import Record
from jddp.trainer.reports.lines import (
    COLUMNS,
    Course,
    live_lines,
    metrics_of,
    not_finite_values,
    tables_in,
    train_line,
    unbroken,
    wrap,
)
from jddp.trainer.reports.log_file import say

if TYPE_CHECKING:
    from IPython.display import DisplayHandle
    from rich.console import Console

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_UPDATES, NOTEBOOK_COLUMNS = 1.0, 120
NARROWEST, WIDEST = 40, 100
BAR_COLUMNS = 10
NARROWEST_WITH_BAR = 60
WAY_OUT = (
    "Look for examples with NaN, a mask without a valid entry, and batch statistics; the run "
    "continues."
)
log = logging.getLogger("jddp")


class Display:
    """A sink that shows records; if not `is_writer`, it shows nothing.

    Args:
      course: Facts of the run that its records do not have; they may change.
      is_writer: Whether this process shows anything.

    Attributes:
      course: These facts.
    """

    def __init__(self, course: Course, *, is_writer: bool) -> None:
        self.course = course
        self._output = _output(course.num_steps) if is_writer else None

    def log(self, record: Record) -> None:
        """Shows a record of training, or of an evaluation with a table for each of its arrays."""
        if record["split"] == "eval":
            self._log_evaluation(record)
            return
        step, num_steps = record["step"], self.course.num_steps
        say(train_line(record, self.course), "step", step=step, num_steps=num_steps)
        if self._output:
            self._output.update(record, self.course)

    def _log_evaluation(self, record: Record) -> None:
        fields = [f"eval {record['step']}", *metrics_of(record)]
        fields.append(f"examples {record['examples']:.0f}")
        columns = columns_of(sys.stdout)
        say("  ".join(fields), "eval", step=record["step"])
        self._print("\n".join(wrap("  ".join(map(unbroken, fields)), columns)))
        if odd := not_finite_values(record):
            self.note(f"eval {record['step']} is not finite: {odd}. {WAY_OUT}")
        for line in tables_in(record, columns):
            say(line)
            self._print(line)

    def note(self, text: str, kind: str = "", **facts: object) -> None:
        """Shows a sentence, and records the event that it reports, as `log_file.say` does."""
        say(text, kind, **facts)
        self._print("\n".join(wrap(text, columns_of(sys.stdout))))

    def close(self) -> None:
        """Restores the terminal; called also when training fails."""
        if self._output:
            self._output.close()

    def _print(self, text: str) -> None:
        if self._output:
            self._output.print(printable_lines(text))


class _Lines:
    """A line every few seconds and at the end, in a file or a pipe."""

    def __init__(self) -> None:
        self._stream = sys.stdout
        self._updated_at = -math.inf

    def update(self, record: Record, course: Course) -> None:
        if self._is_due(SECONDS_BETWEEN_LINES) or record["step"] >= course.num_steps:
            self.print(train_line(record, course, columns_of(self._stream)))

    def print(self, text: str) -> None:
        # A run continues without its terminal or pipe.
        with contextlib.suppress(OSError, ValueError):
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass

    def _is_due(self, seconds: float) -> bool:
        now = time.monotonic()
        if is_due := now >= self._updated_at + seconds:
            self._updated_at = now
        return is_due


class _Terminal(_Lines):
    """A bar and lines at the bottom of a terminal that can move its cursor."""

    def __init__(self, num_steps: int, console: "Console") -> None:
        from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

        super().__init__()
        has_room = columns_of(self._stream) >= NARROWEST_WITH_BAR
        bar: list[ProgressColumn] = [BarColumn(BAR_COLUMNS)] if has_room else []
        text = TextColumn("{task.description}", markup=False)
        self._live = Progress(*bar, text, console=console, refresh_per_second=2)
        self._task = self._live.add_task("compiling", total=num_steps)
        self._live.start()

    def update(self, record: Record, course: Course) -> None:
        columns = columns_of(self._stream)
        columns -= BAR_COLUMNS + 1 if columns >= NARROWEST_WITH_BAR else 0
        text = live_lines(record, course, columns)
        done = {"total": course.num_steps, "completed": record["step"]}
        self._live.update(self._task, description=text, **done)

    def print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._live.console.print(text, markup=False, soft_wrap=True)  # above the bar

    def close(self) -> None:
        self._live.stop()


class _Notebook(_Lines):
    """A bar and lines in an element of a notebook; a failure of the front end is logged, once."""

    def __init__(self, element: "DisplayHandle") -> None:
        super().__init__()
        self._element: DisplayHandle | None = element
        self._newest = {"text/plain": "compiling"}

    def update(self, record: Record, course: Course) -> None:
        text = "\n".join(filter(None, [train_line(record, course, NOTEBOOK_COLUMNS), course.best]))
        bar = f'<progress value="{record["step"]}" max="{course.num_steps}"></progress>'
        self._newest = {"text/html": f"{bar}<pre>{escape(text)}</pre>", "text/plain": text}
        if self._is_due(SECONDS_BETWEEN_UPDATES):
            self.close()

    def close(self) -> None:
        try:
            if self._element is not None:
                self._element.update(self._newest, raw=True)
        except Exception as error:  # The front end is gone, or cannot show it.
            self._element = None
            log.warning("The notebook cannot show progress: %r", error)


def _output(num_steps: int) -> _Lines:
    """The output for the place in which the process runs."""
    ipython = sys.modules.get("IPython")  # The kernel of Jupyter, VS Code or Colab has imported it.
    if getattr(ipython and ipython.get_ipython(), "kernel", None) is not None:
        from IPython.display import display

        return _Notebook(display({"text/plain": "compiling"}, raw=True, display_id=True))
    if is_watched(sys.stdout):
        from rich.console import Console  # Only a terminal needs it, and it costs 0.1 s.

        console = Console(file=sys.stdout, highlight=False)
        if not console.is_dumb_terminal:
            return _Terminal(num_steps, console)
    return _Lines()


def is_watched(stream: TextIO) -> bool:
    """Whether this is the terminal that the process runs in.

    Open MPI gives every process a pseudo-terminal, whose output goes into a pipe. There one live
    line would become thousands.
    """
    try:
        return bool(stream.isatty() and os.tcgetpgrp(stream.fileno()))
    except (OSError, ValueError, AttributeError):  # of no session, of another one, or closed
        return False


def columns_of(stream: TextIO) -> int:
    """The width for text: the width of the terminal now, from 40 to 100; 80 of a file or a pipe."""
    if not is_watched(stream):
        return COLUMNS
    return min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)
