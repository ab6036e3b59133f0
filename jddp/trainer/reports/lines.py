"""Records in words, in lines that fit: fields that matter less are left out first.

    step 400/1170  loss 0.2384  accuracy 0.9123  10.8k images/s  MFU 41.2 %  ETA 0:18

On a terminal two lines are live, or three if a metric is watched:

    step 400/1170  epoch 3.4/10  ETA 0:18
    loss 0.2384  accuracy 0.9123  lr 0.0016  10.8k images/s  MFU 41.2 %
    best accuracy 0.869 at step 300

The remaining time (ETA) is computed from the `step_seconds` of the newest record, which excludes
compilation, and from the newest evaluation and save.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jddp.errors import printable
from jddp.trainer.reports import rates
from jddp.trainer.reports.pauses import Pause, seconds_left
from jddp.trainer.reports.terminal import COLUMNS
from jddp.typing import RESERVED, Record

BESIDE_METRICS = ("grad_norm", "skipped", "loss_scale")  # shown in their line


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


def is_metric(name: str, value: object) -> bool:
    """Whether this value of a record is the loss or a metric of the loss function."""
    return isinstance(value, float | int) and (name == "loss" or name not in RESERVED)


def not_finite_values(record: Record) -> str:
    """The numbers of an evaluation that are NaN or infinite, such as "loss nan"; "" for none.

    Arrays are not checked: the recall of a class without examples is NaN by definition.
    """
    odd = {name: x for name, x in record.items() if isinstance(x, float) and not math.isfinite(x)}
    return ", ".join(f"{printable(name)} {x}" for name, x in odd.items())


def metrics_of(record: Record, digits: int = 4) -> list[str]:
    """The loss, then the metrics of the loss function in their order."""
    shown = [n for n, x in record.items() if n in BESIDE_METRICS or is_metric(n, x)]
    names = dict.fromkeys(["loss", *shown])
    return [f"{printable(name)} {record[name]:.{digits}g}" for name in names]


def train_line(record: Record, course: Course, columns: int = COLUMNS) -> str:
    """Step, epoch, loss, metrics, rates, data wait and remaining time, in one line.

    If it is too long, the epoch is left out, then FLOP/s, the learning rate and MFU, then digits,
    then the speed and the data wait, then the last metrics.
    """
    step, epoch, left = _position(record, course)
    fields = {"step": step, "epoch": epoch, **_measured(record, course), "left": left}
    shorter = {**fields, "metrics": "  ".join(metrics_of(record, digits=3))}
    least = "epoch", *_least(record)
    line = _without(fields, least[:-2], columns) or _without(shorter, least, columns)
    return line or _join([step, *metrics_of(record, digits=3)], left, columns)


def live_lines(record: Record, course: Course, columns: int = COLUMNS) -> str:
    """The same in two lines, and the best evaluation in a third."""
    step, epoch, left = _position(record, course)
    place = _without({"step": step, "epoch": epoch, "left": left}, ("epoch",), columns)
    measured = _without(_measured(record, course), _least(record), columns)
    lines = [
        place or _join([step], left, columns),
        measured or _join(metrics_of(record, digits=3), "", columns),
        course.best[:columns],
    ]
    return "\n".join(filter(None, lines))


def _position(record: Record, course: Course) -> tuple[str, str, str]:
    """The step, the epoch and the remaining time."""
    step, epoch, left = record["step"], "", ""
    if course.steps_per_epoch is not None:
        in_all = record["epoch"] + (course.num_steps - step) / course.steps_per_epoch
        epoch = f"epoch {_epochs(record['epoch'])}/{_epochs(in_all)}"
    if (seconds := record.get("step_seconds")) is not None:
        left = f"ETA {_duration(seconds_left(step, course.num_steps, seconds, course.pauses))}"
    return f"step {step}/{course.num_steps}", epoch, left


def _measured(record: Record, course: Course) -> dict[str, str]:
    """The loss and metrics, the learning rate, the speed, MFU or FLOP/s, and the data wait."""
    rate = record.get("learning_rate")
    return {
        "metrics": "  ".join(metrics_of(record)),
        "rate": "" if rate is None else f"lr {rate:.2g}",
        "speed": rates.speed(record, course.unit),
        "use": rates.mfu(record) or rates.flops(record),  # FLOP/s on a device of unknown peak
        "wait": rates.data_wait(record),
    }


def _least(record: Record) -> tuple[str, ...]:
    """The names of fields, from the one that matters least."""
    # The learning rate is known beforehand, but FLOP/s without a peak mean even less.
    first = ("rate", "use") if "mfu" in record else ("use", "rate")
    return (*first, "speed", "wait")


def _without(fields: dict[str, str], least: Iterable[str], columns: int) -> str:
    """The fields in a line, without as many of the least ones as needed; "" if it is too long."""
    shown = dict(fields)
    for name in ("", *least):
        shown.pop(name, None)
        line = "  ".join(filter(None, shown.values()))
        if len(line) <= columns:
            return line
    return ""


def _join(start: list[str], end: str, columns: int) -> str:
    """All fields in a line; without the last fields of `start` if there is no room for them."""
    kept = [start[:num] for num in range(len(start), 0, -1)]
    lines = ["  ".join(filter(None, [*some, end])) for some in kept]
    return next((line for line in lines if len(line) <= columns), lines[-1][:columns])


def _epochs(number: float) -> str:
    return f"{number:.2g}" if number < 10 else f"{number:.0f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
