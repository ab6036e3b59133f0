"""Records in words: arrays, and lines that fit, without the fields that matter least.

    step 400/1170  loss 0.2384  accuracy 0.9123  10.8k images/s  MFU 41.2 %  ETA 0:18

On a terminal two lines are live, or three if a metric is watched:

    step 400/1170  epoch 3.4/10  ETA 0:18
    loss 0.2384  accuracy 0.9123  lr 0.0016  10.8k images/s  MFU 41.2 %
    best accuracy 0.869 at step 300

Metrics that are arrays, such as a confusion matrix, are printed below the line of an evaluation:

    confusion
    [[90.  3.  7.]
     [ 4. 88.  8.]
     [ 0.  1. 99.]]

The remaining time (ETA) is computed from the `step_seconds` of the newest record, which excludes
compilation, and from the newest evaluation and save.
"""

import contextlib
import dataclasses
import math
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jddp.data.periods import Period
from jddp.ground.errors import printable
from jddp.ground.typing import RESERVED, Record

COLUMNS = 80  # of a file or a pipe
BESIDE_METRICS = ("grad_norm", "skipped", "loss_scale")  # shown in their line
EXPOSED_SHARE = "exposed_communication"
NOTICED_WAIT = 0.05  # share of a step
MOST_NUMBERS = 1000  # of an array: of a larger one only the corners are shown

Field = tuple[int, str]  # a rank, from 0 for the most important fields, and a text


@dataclasses.dataclass
class Pause:
    """Evaluations or saves of a run, for which its steps pause.

    Attributes:
      every_steps: Steps between two of them, on average; infinity for one at the end alone.
      seconds: Time of the newest one, which compiles nothing if it is not the first; 0 before.
    """

    every_steps: float
    seconds: float = 0.0

    @classmethod
    def at_ends_of(cls, period: Period | None, steps_per_epoch: float | None = None) -> "Pause":
        """The pauses at the ends of a period, or at the end of the run alone."""
        return cls(math.inf if period is None else period.in_steps(steps_per_epoch))

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """While open, the steps pause."""
        since = time.perf_counter()
        yield
        self.seconds = time.perf_counter() - since

    def num_left(self, step: int, num_steps: int) -> int:
        """Number of pauses from the end of `step` on: at multiples of the period and at the end."""
        every = self.every_steps
        return 1 + int((num_steps - 1) // every - (step - 1) // every)


@dataclasses.dataclass
class Course:
    """Facts of a run that its records do not have.

    Attributes:
      num_steps: Number of steps of the whole run.
      unit: Unit of examples.
      steps_per_epoch: Number of steps in a pass over the data; None if unknown.
      pauses: The evaluations and saves of the run.
      best: The best evaluation so far, in words; "" without one.
    """

    num_steps: int
    unit: str = "ex"
    steps_per_epoch: float | None = None
    pauses: Sequence[Pause] = ()
    best: str = ""

    def seconds_left(self, step: int, step_seconds: float) -> float:
        """An estimate of the time from the end of `step` to the end of the run."""
        paused = sum(x.seconds * x.num_left(step, self.num_steps) for x in self.pauses)
        return (self.num_steps - step) * step_seconds + paused


def is_metric(name: str, value: object) -> bool:
    """Whether this value of a record is the loss or a metric of the loss function."""
    return isinstance(value, float | int) and (name == "loss" or name not in RESERVED)


def not_finite_values(record: Record) -> str:
    """The numbers of an evaluation that are NaN or infinite, such as "loss nan"; "" for none.

    Arrays are not checked: the recall of a class without examples is NaN by definition.
    """
    odd = {name: x for name, x in record.items() if isinstance(x, float) and not math.isfinite(x)}
    return ", ".join(f"{printable(name)} {x}" for name, x in odd.items())


def metrics_of(record: Record) -> list[str]:
    """The loss, then the metrics of the loss function in their order."""
    shown = [n for n, x in record.items() if n in BESIDE_METRICS or is_metric(n, x)]
    return [f"{printable(name)} {record[name]:.4g}" for name in dict.fromkeys(["loss", *shown])]


def train_line(record: Record, course: Course, columns: int = COLUMNS) -> str:
    """Step, epoch, loss, metrics, rates, data wait and remaining time, in one line.

    If it is too long, the epoch is left out, then FLOP/s, the learning rate and MFU, then the speed
    and the data wait, then the last metrics.
    """
    step, epoch, left = _position(record, course)
    return _fitted([step, epoch, *_measured(record, course), left], columns)


def live_lines(record: Record, course: Course, columns: int = COLUMNS) -> str:
    """The same in two lines, and the best evaluation in a third."""
    fields = _position(record, course), _measured(record, course)
    lines = [*(_fitted(x, columns) for x in fields), course.best[:columns]]
    return "\n".join(filter(None, lines))


def _position(record: Record, course: Course) -> list[Field]:
    """The step, the epoch and the remaining time."""
    step, epoch, left = record["step"], "", ""
    if course.steps_per_epoch is not None:
        in_all = record["epoch"] + (course.num_steps - step) / course.steps_per_epoch
        epoch = f"epoch {_epochs(record['epoch'])}/{_epochs(in_all)}"
    if (seconds := record.get("step_seconds")) is not None:
        left = f"ETA {_duration(course.seconds_left(step, seconds))}"
    return [(0, f"step {step}/{course.num_steps}"), (7, epoch), (0, left)]


def _measured(record: Record, course: Course) -> list[Field]:
    """The loss and metrics, the learning rate, the speed, MFU or FLOP/s, and the data wait."""
    rate = record.get("learning_rate")
    # The learning rate is known beforehand, but FLOP/s without a peak mean even less.
    use = (4, mfu(record)) if "mfu" in record else (6, flops(record))
    return [
        *((1, metric) for metric in metrics_of(record)),
        (5, "" if rate is None else f"lr {rate:.2g}"),
        (3, speed(record, course.unit)),
        use,
        (2, data_wait(record)),
    ]


def _fitted(fields: Iterable[Field], columns: int) -> str:
    """The fields in a line, without as many of the least important ones as needed."""
    shown = [field for field in fields if field[1]]
    while len(line := "  ".join(text for _, text in shown)) > columns and len(shown) > 1:
        del shown[max(range(len(shown)), key=lambda i: (shown[i][0], i))]
    return line[:columns]


def _epochs(number: float) -> str:
    return f"{number:.2g}" if number < 10 else f"{number:.0f}"


def _duration(seconds: float) -> str:
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
    """The rates, the measured and the predicted peak memory, and exposed communication."""
    fields = [speed(record, unit), flops(record), mfu(record)]
    if (peak := record.get("peak_memory_bytes")) is not None:
        predicted = record.get("predicted_memory_bytes")
        of_plan = "" if predicted is None else f" ({predicted / 2**30:.1f} predicted)"
        fields.append(f"peak memory {peak / 2**30:.1f} GiB{of_plan}")
    if (share := record.get(EXPOSED_SHARE)) is not None:
        fields.append(f"{share:.1%} of traced steps exposed communication")
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


def array_lines(values: Sequence[Any], columns: int) -> list[str]:
    """Returns lines for a list, or nested lists of equal lengths, as numpy prints arrays.

    Args:
      values: Numbers; None for one that is not finite, as JSON has no NaN and no infinity.
      columns: Width of the terminal.
    """
    array = np.array(values, float)
    text = np.array2string(array, max_line_width=columns, precision=4, threshold=MOST_NUMBERS)
    return text.splitlines()
