"""The progress of a run: a live display on a terminal, a plain line every few seconds elsewhere.

    step 400/1170  loss 0.2384  accuracy 0.9123  10.8k images/s  MFU 41.2 %  ETA 0:18
    eval 400  loss 0.361  accuracy 0.869  examples 10000
    recall     0     1
            0.81  0.93

Text is as wide as the terminal, from 40 to 100 columns, and 80 in a file or a pipe. All lines go
into the process's log file.
"""

import contextlib
import math
import sys
import time

from jddp.errors import printable_lines
from jddp.trainer.reports.lines import (
    Course,
    live_lines,
    metrics_of,
    not_finite_values,
    train_line,
)
from jddp.trainer.reports.log_file import said
from jddp.trainer.reports.tables import tables_in
from jddp.trainer.reports.terminal import (
    columns_of,
    is_watched,
    live_columns,
    live_display,
    unbroken,
    wrap,
)
from jddp.typing import Record

SECONDS_BETWEEN_LINES = 5.0
WAY_OUT = (
    "Look for examples with NaN, a mask without a valid entry, and batch statistics; the run "
    "continues."
)


class Progress:
    """A sink that prints records; if not `is_writer`, it prints nothing.

    Args:
      course: Facts of the run that its records do not have; they may change.
      is_writer: Whether this process prints.

    Attributes:
      course: These facts.
    """

    def __init__(self, course: Course, *, is_writer: bool) -> None:
        self.course = course
        self._is_writer = is_writer
        self._stream = sys.stdout
        self._printed_at = -math.inf
        is_live = is_writer and is_watched(self._stream)
        self._live = live_display(course.num_steps, self._stream) if is_live else None

    def log(self, record: Record) -> None:
        """Shows a record of training or of an evaluation."""
        if record["split"] == "eval":
            self._log_evaluation(record)
        else:
            self._log_step(record)

    def _log_step(self, record: Record) -> None:
        """Shows a record of training; off a terminal, only every few seconds and at the end."""
        now = time.monotonic()
        line = train_line(record, self.course)
        done = {"total": self.course.num_steps, "completed": record["step"]}
        if self._live:
            text = live_lines(record, self.course, live_columns(self._stream))
            self._live.update(self._live.task_ids[0], description=text, **done)
        elif done["completed"] >= done["total"] or now >= self._printed_at + SECONDS_BETWEEN_LINES:
            self._printed_at = now
            self._print(train_line(record, self.course, columns_of(self._stream)))
        said.info(line)

    def _log_evaluation(self, record: Record) -> None:
        """Shows a record of an evaluation, and a table for each metric that is an array."""
        fields = [f"eval {record['step']}", *metrics_of(record)]
        fields.append(f"examples {record['examples']:.0f}")
        columns = columns_of(self._stream)
        self._print("\n".join(wrap("  ".join(map(unbroken, fields)), columns)))
        said.info("  ".join(fields))
        if found := not_finite_values(record):
            self.note(f"eval {record['step']} is not finite: {found}. {WAY_OUT}")
        for line in tables_in(record, columns):
            self._print(line)
            said.info(line)

    def note(self, text: str) -> None:
        """Shows a sentence."""
        self._print("\n".join(wrap(text, columns_of(self._stream))))
        said.info(text)

    def close(self) -> None:
        """Restores the terminal; called also when training fails."""
        if self._live:
            self._live.stop()
            self._live = None

    def _print(self, line: str) -> None:
        text = printable_lines(line)
        # A run continues without its terminal or pipe.
        with contextlib.suppress(OSError, ValueError):
            if self._live:
                self._live.console.print(text, markup=False, soft_wrap=True)  # above the display
            elif self._is_writer:
                print(text, file=self._stream, flush=True)
