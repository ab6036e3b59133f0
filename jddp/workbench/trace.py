"""The time of steps, read from traces of `jax.profiler`: compute, exposed communication, idle.

    print(read_trace("runs/one"))               # of all processes that left a trace there
    read_trace(folder).devices["GPU:0"].exposed

The definitions are those of Holistic Trace Analysis. A device communicates while a collective runs,
which includes its wait for other devices. It computes while any other kernel but a copy runs. What
remains of its communication is exposed, and what remains of its time is idle.
https://hta.readthedocs.io/en/latest/source/features/temporal_breakdown.html
"""

import functools
import re
import statistics
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jax.profiler import ProfileData, ProfilePlane

from jddp.errors import DataError
from jddp.trainer.profile import DATA, STEP
from jddp.typing import JsonObject, Shown
from jddp.workbench.kernels import DeviceTime, Kernels, kernels_of
from jddp.workbench.pictures.times import MEASURED, StepTimes

_ROW = "{:<18}{:>11}{:>11}{:>16}{:>11}{:>11}"


@dataclass(frozen=True, repr=False)
class Trace(Shown):
    """The time of traced steps; its `str` fits a terminal of 80 columns.

    Attributes:
      steps: Numbers of the steps, in order; empty if the trace was not made by a run of jddp.
      kernels: The kernels of each device in all steps together, by its name, such as "GPU:0"; of
        several processes "process_1 GPU:0".
      data_wait: Seconds in which a process waits for batches, on average over processes.
    """

    steps: tuple[int, ...]
    kernels: dict[str, Kernels]
    data_wait: float

    @functools.cached_property
    def devices(self) -> dict[str, DeviceTime]:
        """The time of each device in all steps together."""
        return {name: x.time for name, x in self.kernels.items()}

    @property
    def num_steps(self) -> int:
        """Steps of which times are means: 1 for the whole trace where no step is known."""
        return len(self.steps) or 1

    @property
    def mean(self) -> DeviceTime:
        """The time of a step and device, on average."""
        columns = zip(*self.devices.values(), strict=True)
        return DeviceTime(*(statistics.fmean(x) / self.num_steps for x in columns))

    @property
    def times(self) -> StepTimes:
        """Where the time of a step goes, on average over steps and devices."""
        mean, wait = self.mean, self.data_wait / self.num_steps
        parts = mean.span, mean.compute, mean.exposed, mean.idle
        return StepTimes(MEASURED, *parts, wait if self.steps else None)

    @property
    def verdict(self) -> str:
        """The time of a step, and the shares of it in which a device waits, in one sentence."""
        mean = self.mean
        what = "a step takes" if self.steps else "the trace covers"
        return (
            f"Measured: {what} {mean.span * 1e3:,.2f} ms, of which a device computes "
            f"{mean.compute / mean.span:.1%}, waits for communication "
            f"{mean.exposed / mean.span:.1%} and is idle {mean.idle / mean.span:.1%}."
        )

    @property
    def about(self) -> str:
        """The steps, in words."""
        if not self.steps:
            return "The trace has no steps of a run of jddp: times are of all of it"
        return f"steps {self.steps[0]} to {self.steps[-1]}, of which times are means"

    def as_json(self) -> JsonObject:
        """The same as values of JSON; times are in seconds for each step."""
        num_steps = self.num_steps
        return {
            "verdict": self.verdict,
            "kind": "measured",
            "steps": [*self.steps],
            "data_wait_seconds": self.data_wait / num_steps,
            "devices": {name: _fields(x, num_steps) for name, x in self.devices.items()},
        }

    def __repr__(self) -> str:
        """A verdict, and a table of the devices."""
        num_steps, wait = self.num_steps, self.data_wait
        lines = [*textwrap.wrap(self.verdict, 79), "", f"{self.about}; ms"]
        lines.append(_ROW.format("device", "step", "compute", "communication", "exposed", "idle"))
        for name, time in self.devices.items():
            row = (time.span, time.compute, time.communication, time.exposed, time.idle)
            lines.append(_ROW.format(name, *(f"{x * 1e3 / num_steps:,.2f}" for x in row)))
        if self.steps:
            lines += ["", f"A process waits {wait * 1e3 / num_steps:,.2f} ms a step for its batch."]
        return "\n".join(lines)


def read_trace(folder: str | Path) -> Trace:
    """Reads the newest trace of each process.

    Args:
      folder: A run directory, or any folder that `jax.profiler` has written into.

    Raises:
      DataError: If there is none, or it holds no kernel of a device.
    """
    files = _newest(Path(folder))
    if not files:
        raise DataError(
            f"{folder} holds no trace of jax.profiler (*.xplane.pb). A run records one with "
            "train.profile_steps=[10,13]."
        )
    steps, waits, kernels = set[int](), list[float](), dict[str, Kernels]()
    for process, file in files.items():
        planes = _planes(file)
        notes = list(_annotations(planes))
        steps |= {number for name, number, _ in notes if name == STEP}
        waits.append(sum(seconds for name, _, seconds in notes if name == DATA))
        prefix = f"{process} " if len(files) > 1 else ""
        kernels |= {f"{prefix}{name}": x for name, x in kernels_of(planes).items()}
    if not kernels:
        raise DataError(f"{folder}: the trace holds no kernel of a device.")
    return Trace(tuple(sorted(steps)), kernels, statistics.fmean(waits))


def _planes(file: Path) -> list[ProfilePlane]:
    try:
        return list(ProfileData.from_file(str(file)).planes)
    except RuntimeError as error:
        raise DataError(f"{file} is damaged: {error}. Record it again.") from error


def _newest(folder: Path) -> dict[str, Path]:
    """The newest file of each process, by the name of its folder."""
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    found = {}
    for file in files:
        process = [x for x in file.parts if re.fullmatch(r"process_\d+", x)]
        found[process[-1] if process else file.stem] = file
    return dict(sorted(found.items()))


def _annotations(planes: Iterable[ProfilePlane]) -> Iterator[tuple[str, int, float]]:
    """Names, numbers of steps and seconds of what a run annotates."""
    for plane in planes:
        if plane.name == "/host:CPU":
            for event in (event for line in plane.lines for event in line.events):
                if event.name in (STEP, DATA):
                    yield event.name, dict(event.stats).get("step_num", 0), event.duration_ns / 1e9


def _fields(time: DeviceTime, num_steps: int) -> JsonObject:
    seconds = {**time._asdict(), "idle": time.idle}
    return {f"{name}_seconds": x / num_steps for name, x in seconds.items()}
