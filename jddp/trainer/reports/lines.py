"""The progress of a run: live on a terminal and in a notebook, plain lines elsewhere.

    step 400/1170  loss 0.2384  accuracy 0.9123  10.8k images/s  MFU 41.2 %  ETA 0:18

On a terminal this line is live, and a second one if a metric is watched:

    best accuracy 0.869 at step 300

Metrics that are arrays, such as a confusion matrix, are printed below the line of an evaluation:

    confusion
    [[90.  3.  7.]
     [ 4. 88.  8.]
     [ 0.  1. 99.]]

Text is as wide as the terminal, from 40 to 100 columns, and 80 in a file or a pipe. All lines go
into the process's log file. A notebook shows a bar and the newest lines in one element of static
HTML, which it keeps, also where it is saved, run without a browser, or exported.

The remaining time (ETA) is computed from the time since the first record, which includes
evaluations and saves, but not the compilation.
"""

import contextlib
import dataclasses
import logging
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, TextIO

import numpy as np

from jddp.ground.errors import printable, printable_lines
from jddp.ground.typing import RESERVED, Record
from jddp.trainer.reports.files import say

if TYPE_CHECKING:
    from IPython.display import DisplayHandle
    from rich.console import Console


COLUMNS = 80  # Width of a file or a pipe.
BESIDE_METRICS = ("grad_norm", "skipped", "loss_scale")  # Fields in the line of the metrics.
NOTICED_WAIT = 0.05  # Share of a step from which a wait is shown.
MOST_NUMBERS = 1000  # Size of an array above which only its corners are shown.
SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_UPDATES, NOTEBOOK_COLUMNS = 1.0, 120
NARROWEST, WIDEST = 40, 100
BAR_COLUMNS = 10
NARROWEST_WITH_BAR = 60
log = logging.getLogger("jddp")

Field = tuple[int, str]  # a rank, from 0 for the most important fields, and a text


@dataclasses.dataclass
class Course:
    """Facts of a run that its records do not have, and its progress.

    Attributes:
      num_steps: Number of steps of the whole run.
      unit: Unit of examples.
      steps_per_epoch: Number of steps in a pass over the data; None if unknown.
      best: The best evaluation so far, in words; "" without one.
      first: Step and time of the first record; None before.
      step_seconds: Seconds of a step since then, with evaluations and saves; None before another.
    """

    num_steps: int
    unit: str = "ex"
    steps_per_epoch: float | None = None
    best: str = ""
    first: tuple[int, float] | None = None
    step_seconds: float | None = None

    def reach(self, step: int) -> None:
        """Takes the time of a record."""
        now = time.monotonic()
        first_step, since = self.first = self.first or (step, now)
        if step > first_step:
            self.step_seconds = (now - since) / (step - first_step)


def is_metric(name: str, value: object) -> bool:
    """Whether this value of a record is the loss or a metric of the loss function."""
    return isinstance(value, float | int) and (name == "loss" or name not in RESERVED)


def metrics_of(record: Record) -> list[str]:
    """The loss, then the metrics of the loss function in their order."""
    shown = [n for n, x in record.items() if n in BESIDE_METRICS or is_metric(n, x)]
    return [f"{printable(name)} {record[name]:.4g}" for name in dict.fromkeys(["loss", *shown])]


def train_line(record: Record, course: Course, columns: int = COLUMNS) -> str:
    """Step, epoch, loss, metrics, rates, data wait and remaining time, in one line.

    If it is too long, the epoch is left out, then FLOP/s, the learning rate and MFU, then the speed
    and the data wait, then the last metrics.
    """
    step, epoch, left = record["step"], "", ""
    if course.steps_per_epoch is not None:
        in_all = record["epoch"] + (course.num_steps - step) / course.steps_per_epoch
        epoch = f"epoch {_epochs(record['epoch'])}/{_epochs(in_all)}"
    if (seconds := course.step_seconds or record.get("step_seconds")) is not None:
        left = f"ETA {duration((course.num_steps - step) * seconds)}"
    rate = record.get("learning_rate")
    # The learning rate is known beforehand, but FLOP/s without a peak mean even less.
    use = (4, mfu(record)) if "mfu" in record else (6, flops(record))
    fields = [
        (0, f"step {step}/{course.num_steps}"),
        (7, epoch),
        *((1, metric) for metric in metrics_of(record)),
        (5, "" if rate is None else f"lr {rate:.2g}"),
        (3, speed(record, course.unit)),
        use,
        (2, data_wait(record)),
        (0, left),
    ]
    return _fitted(fields, columns)


def _fitted(fields: Iterable[Field], columns: int) -> str:
    """The fields in a line, without as many of the least important ones as needed."""
    shown = [field for field in fields if field[1]]
    while len(line := "  ".join(text for _, text in shown)) > columns and len(shown) > 1:
        del shown[max(range(len(shown)), key=lambda i: (shown[i][0], i))]
    return line[:columns]


def _epochs(number: float) -> str:
    return f"{number:.2g}" if number < 10 else f"{number:.0f}"


def duration(seconds: float) -> str:
    """A time as hours, minutes and seconds: "2:31", "1:02:31"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def speed(record: Record, unit: str) -> str:
    """Tokens per second, or else examples per second, in `unit`; "" without either."""
    if (tokens := record.get("tokens_per_second")) is not None:
        return f"{_short(tokens)} tokens/s"
    examples = record.get("examples_per_second")
    return "" if examples is None else f"{_short(examples)} {unit}/s"


def mfu(record: Record) -> str:
    """Model FLOPs utilization of all devices, such as "MFU 16.5 %"."""
    share = record.get("mfu")
    return "" if share is None else f"MFU {100 * share:.3g} %"


def flops(record: Record) -> str:
    """Model FLOP/s of all devices together, such as "163 TFLOP/s"."""
    number = record.get("model_flops_per_second")
    return f"{_short(number, ' ')}FLOP/s" if number else ""


def data_wait(record: Record) -> str:
    """The share of a step in which the devices wait for data, if it is noticeable."""
    wait, step = record.get("data_wait_seconds"), record.get("step_seconds")
    if wait is None or not step or wait / step < NOTICED_WAIT:
        return ""
    return f"data wait {100 * wait / step:.0f} %"


def summary(record: Record, unit: str) -> str:
    """The rates, and the measured and the predicted peak memory."""
    fields = [speed(record, unit), flops(record), mfu(record)]
    if (peak := record.get("peak_memory_bytes")) is not None:
        predicted = record.get("predicted_memory_bytes")
        of_plan = "" if predicted is None else f" ({predicted / 2**30:.1f} predicted)"
        fields.append(f"peak memory {peak / 2**30:.1f} GiB{of_plan}")
    return ", ".join(filter(None, fields))


def _short(number: float, space: str = "") -> str:
    for letter, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{space}{letter}"
    return f"{number:.3g}{space}"


def unbroken(text: str) -> str:
    """The text as one word, which `wrap` does not divide."""
    return text.replace(" ", "\xa0")


def wrap(text: str, columns: int, *, indent: str = "  ") -> list[str]:
    """The lines of a text. A path stays whole, so that it can be copied."""
    lines = textwrap.wrap(
        text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\xa0", " ") for line in lines]


def tables_in(record: Record, columns: int) -> Iterator[str]:
    """Yields the name and the lines of each metric of a record that is an array."""
    for name, value in record.items():
        if isinstance(value, list):
            yield printable(name)
            yield from array_lines(value, columns)


def array_lines(values: Sequence[object], columns: int) -> list[str]:
    """Returns lines for a list, or nested lists of equal lengths, as numpy prints arrays.

    Args:
      values: Numbers; None for one that is not finite, as JSON has no NaN and no infinity.
      columns: Width of the terminal.
    """
    array = np.array(values, float)
    text = np.array2string(array, max_line_width=columns, precision=4, threshold=MOST_NUMBERS)
    return text.splitlines()


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
        self.course.reach(step)
        say(train_line(record, self.course), "step", step=step, num_steps=num_steps)
        if self._output:
            self._output.update(record, self.course)

    def _log_evaluation(self, record: Record) -> None:
        fields = [f"eval {record['step']}", *metrics_of(record)]
        fields.append(f"examples {record['examples']:.0f}")
        columns = columns_of(sys.stdout)
        say("  ".join(fields), "eval", step=record["step"])
        self._print("\n".join(wrap("  ".join(map(unbroken, fields)), columns)))
        for line in tables_in(record, columns):
            say(line)
            self._print(line)

    def note(self, text: str, kind: str = "", **facts: object) -> None:
        """Shows a sentence, and records the event that it reports, as `files.say` does."""
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
        self._updated_at = -float("inf")

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
        text = "\n".join(filter(None, [train_line(record, course, columns), course.best[:columns]]))
        done = {"total": course.num_steps, "completed": record["step"]}
        self._live.update(self._task, description=text, **done)

    def print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._live.console.print(text, markup=False, soft_wrap=True)  # Printed above the bar.

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
    except (OSError, ValueError, AttributeError):  # No session, another one, or a closed stream.
        return False


def columns_of(stream: TextIO) -> int:
    """The width for text: the terminal's width now, from 40 to 100; 80 for a file or a pipe."""
    if not is_watched(stream):
        return COLUMNS
    return min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)
