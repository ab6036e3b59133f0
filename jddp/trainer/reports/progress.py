"""The progress of a run: one live line on a terminal, a plain line every few seconds elsewhere.

    step 400/1170  loss 0.2384  accuracy 0.9123  10.8k images/s  MFU 41.2 %  ETA 0:18
    eval 400  loss 0.361  accuracy 0.869  examples 10000
    recall     0     1
            0.81  0.93

Lines fit 80 columns, and all of them go into the process's log file. The remaining time (ETA) is
computed from the `step_seconds` of the newest record, which excludes compilation.
"""

import contextlib
import math
import os
import sys
import textwrap
import time
from typing import Any, TextIO

from jddp.errors import printable, printable_lines
from jddp.trainer.reports import rates
from jddp.trainer.reports.log_file import said
from jddp.trainer.reports.tables import tables_in
from jddp.typing import RESERVED, Record

COLUMNS = 80
BAR_COLUMNS = 10
SECONDS_BETWEEN_LINES = 5.0
WAY_OUT = (
    "Look for examples with NaN, a mask without a valid entry, and batch statistics; the run "
    "continues."
)
BESIDE_METRICS = ("grad_norm", "skipped", "loss_scale")  # shown in their line


def is_metric(name: str, value: object) -> bool:
    """Whether this value of a record is the loss or a metric of the loss function."""
    return isinstance(value, float | int) and (name == "loss" or name not in RESERVED)


def not_finite_values(record: Record) -> str:
    """The numbers of an evaluation that are NaN or infinite, such as "loss nan"; "" for none.

    Arrays are not checked: the recall of a class without examples is NaN by definition.
    """
    odd = {name: x for name, x in record.items() if isinstance(x, float) and not math.isfinite(x)}
    return ", ".join(f"{printable(name)} {x}" for name, x in odd.items())


class Progress:
    """A sink that prints records; if not `is_writer`, it prints nothing.

    Args:
      num_steps: Number of steps of the whole run.
      is_writer: Whether this process prints.

    Attributes:
      num_steps: Number of steps of the whole run.
      unit: Unit of examples.
    """

    def __init__(self, num_steps: int, *, is_writer: bool) -> None:
        self.num_steps = num_steps
        self.unit = "ex"
        self._is_writer = is_writer
        self._stream = sys.stdout
        self._printed_at = -math.inf
        is_live = is_writer and _is_watched(self._stream)
        self._bar = _live_line(num_steps, self._stream) if is_live else None

    def log(self, record: Record) -> None:
        """Shows a record of training or of an evaluation."""
        if record["split"] == "eval":
            self._log_evaluation(record)
        else:
            self._log_step(record)

    def _log_step(self, record: Record) -> None:
        """Shows a record of training; off a terminal, only every few seconds and at the end."""
        now = time.monotonic()
        full = train_line(record, self.num_steps, unit=self.unit)
        if self._bar:
            columns = COLUMNS - BAR_COLUMNS - 1
            line = train_line(record, self.num_steps, unit=self.unit, columns=columns)
            done = {"total": self.num_steps, "completed": record["step"]}
            self._bar.update(self._bar.task_ids[0], description=line, **done)
        elif record["step"] >= self.num_steps or now >= self._printed_at + SECONDS_BETWEEN_LINES:
            self._printed_at = now
            self._print(full)
        said.info(full)

    def _log_evaluation(self, record: Record) -> None:
        """Shows a record of an evaluation, and a table for each metric that is an array."""
        fields = [f"eval {record['step']}", *_metrics(record)]
        self.note(_join(fields, [f"examples {record['examples']:.0f}"], COLUMNS))
        if found := not_finite_values(record):
            self.note(f"eval {record['step']} is not finite: {found}. {WAY_OUT}")
        for line in tables_in(record, COLUMNS):
            self._print(line)
            said.info(line)

    def note(self, text: str) -> None:
        """Shows a sentence."""
        # A path stays whole, so that it can be copied.
        lines = textwrap.wrap(
            text, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        self._print("\n".join(lines))
        said.info(text)

    def close(self) -> None:
        """Restores the terminal; called also when training fails."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _print(self, line: str) -> None:
        text = printable_lines(line)
        # A run continues without its terminal or pipe.
        with contextlib.suppress(OSError, ValueError):
            if self._bar:
                self._bar.console.print(text, markup=False, soft_wrap=True)  # above the bar
            elif self._is_writer:
                print(text, file=self._stream, flush=True)


def _is_watched(stream: TextIO) -> bool:
    """Whether this is the terminal that the process runs in.

    Open MPI gives every process a pseudo-terminal, whose output goes into a pipe. There one live
    line would become thousands.
    """
    try:
        return bool(stream.isatty() and os.tcgetpgrp(stream.fileno()))
    except (OSError, ValueError, AttributeError):  # of no session, of another one, or closed
        return False


def _live_line(num_steps: int, stream: TextIO) -> Any:
    """A bar and a line at the bottom of a terminal."""
    from rich.console import Console  # Only a terminal needs it, and it costs 0.1 s.
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress

    columns = (BarColumn(BAR_COLUMNS), TextColumn("{task.description}", markup=False))
    console = Console(file=stream, highlight=False)
    bar = RichProgress(*columns, console=console, refresh_per_second=2)
    bar.add_task("compiling", total=num_steps)
    bar.start()
    return bar


def train_line(record: Record, num_steps: int, *, unit: str = "ex", columns: int = COLUMNS) -> str:
    """Step, loss, metrics, learning rate, speed, MFU and remaining time, in one line that fits.

    If it is too long, FLOP/s are left out, then the learning rate, MFU and the speed, then digits,
    then the last metrics.
    """
    step = record["step"]
    time_left = list[str]()
    if (seconds := record.get("step_seconds")) is not None:
        time_left.append(f"ETA {_duration((num_steps - step) * seconds)}")
    full, short = ([f"step {step}/{num_steps}", *_metrics(record, digits)] for digits in (4, 3))
    rate, speed = record.get("learning_rate"), rates.speed(record, unit)
    use = rates.mfu(record) or rates.flops(record)  # FLOP/s on a device of unknown peak
    shown = {"rate": "" if rate is None else f"lr {rate:.2g}", "speed": speed, "use": use}
    # The learning rate is known beforehand, but FLOP/s without a peak mean even less.
    order = ("rate", "use") if "mfu" in record else ("use", "rate")
    for name in ("", *order, "speed"):
        shown.pop(name, None)
        line = "  ".join([*full, *filter(None, shown.values()), *time_left])
        if len(line) <= columns:
            return line
    return _join(short, time_left, columns)


def _metrics(record: Record, digits: int = 4) -> list[str]:
    """The loss, then the metrics of the loss function in their order."""
    shown = [n for n, x in record.items() if n in BESIDE_METRICS or is_metric(n, x)]
    names = dict.fromkeys(["loss", *shown])
    return [f"{printable(name)} {record[name]:.{digits}g}" for name in names]


def _join(start: list[str], end: list[str], columns: int) -> str:
    """All fields in a line; without the last fields of `start` if there is no room for them."""
    lines = ["  ".join([*start[:kept], *end]) for kept in range(len(start), 1, -1)]
    return next((line for line in lines if len(line) <= columns), lines[-1][:columns])


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
