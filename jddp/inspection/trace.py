"""The time of steps, read from traces of `jax.profiler`: compute, exposed communication, idle.

    print(read_trace("runs/one"))               # of all processes that left a trace there
    read_trace(folder).devices["GPU:0"].exposed

The definitions are those of Holistic Trace Analysis. A device communicates while a collective runs,
which includes its wait for other devices. It computes while any other kernel but a copy runs. What
remains of its communication is exposed, and what remains of its time is idle.
https://hta.readthedocs.io/en/latest/source/features/temporal_breakdown.html

In a trace a GPU is a plane "/device:GPU:0", whose lines "Stream #118(MemcpyD2H,Compute)" hold
kernels; other lines repeat them by layer and module. The kernels of all CPU devices are in the
plane "/host:CPU", each with the number of its device.
"""

import re
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData, ProfileEvent, ProfilePlane

from jddp.errors import DataError
from jddp.html import Shown
from jddp.typing import JsonObject

Span = tuple[int, int]  # nanoseconds
STEP, DATA = "jddp step", "jddp data"  # names of what a run annotates in its traces
_ROW = "{:<18}{:>11}{:>11}{:>16}{:>11}{:>11}"
_COLLECTIVE = re.compile(
    r"nccl|(all[-_](reduce|gather|to[-_]all)|reduce[-_]scatter|psum|pmax|pmin|ppermute"
    r"|collective[-_])(?!.*fusion)",
    re.IGNORECASE,
)
_COPY = re.compile(r"memcpy|memset", re.IGNORECASE)
_AROUND_OTHERS = re.compile(r"(while|call|conditional|tuple|parameter)\b")
_PLANE = re.compile(r"/device:(GPU:\d+)")


class DeviceTime(NamedTuple):
    """Seconds of a device from its first kernel to its last.

    Attributes:
      span: All of them.
      compute: Part in which it computes.
      communication: Part in which it communicates.
      exposed: Part in which it communicates and does not compute.
    """

    span: float
    compute: float
    communication: float
    exposed: float

    @property
    def idle(self) -> float:
        """The part in which it neither computes nor communicates."""
        return self.span - self.compute - self.exposed

    @property
    def hidden_share(self) -> float:
        """The share of the communication beside which it computes."""
        return 1 - self.exposed / self.communication if self.communication else 0.0


@dataclass(frozen=True, repr=False)
class Trace(Shown):
    """The time of traced steps; its `str` fits a terminal of 80 columns.

    Attributes:
      steps: Numbers of the steps, in order; empty if the trace was not made by a run of jddp.
      devices: The time of each device in all steps together, by its name, such as "GPU:0"; of
        several processes "process_1 GPU:0".
      data_wait: Seconds in which a process waits for batches, on average over processes.
    """

    steps: tuple[int, ...]
    devices: dict[str, DeviceTime]
    data_wait: float

    @property
    def mean(self) -> DeviceTime:
        """Seconds of a step and device, on average; of the whole trace where no step is known."""
        num_steps = len(self.steps) or 1
        columns = zip(*self.devices.values(), strict=True)
        return DeviceTime(*(statistics.fmean(x) / num_steps for x in columns))

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

    def as_json(self) -> JsonObject:
        """The same as values of JSON; times are in seconds for each step."""
        num_steps = len(self.steps) or 1
        return {
            "verdict": self.verdict,
            "kind": "measured",
            "steps": [*self.steps],
            "data_wait_seconds": self.data_wait / num_steps,
            "devices": {name: _fields(x, num_steps) for name, x in self.devices.items()},
        }

    def __repr__(self) -> str:
        """A verdict, and a table of the devices."""
        num_steps, wait = len(self.steps) or 1, self.data_wait
        about = "The trace has no steps of a run of jddp: times are of all of it"
        if self.steps:
            first, last = self.steps[0], self.steps[-1]
            about = f"steps {first} to {last}, of which times are means"
        lines = [*textwrap.wrap(self.verdict, 79), "", f"{about}; ms"]
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
    steps, waits, devices = set[int](), list[float](), dict[str, DeviceTime]()
    for process, file in files.items():
        planes = _planes(file)
        notes = list(_annotations(planes))
        steps |= {number for name, number, _ in notes if name == STEP}
        waits.append(sum(seconds for name, _, seconds in notes if name == DATA))
        prefix = f"{process} " if len(files) > 1 else ""
        devices |= {f"{prefix}{name}": x for name, x in device_times(planes).items()}
    if not devices:
        raise DataError(f"{folder}: the trace holds no kernel of a device.")
    return Trace(tuple(sorted(steps)), devices, statistics.fmean(waits))


def device_times(planes: Iterable[ProfilePlane]) -> dict[str, DeviceTime]:
    """The time of each device in the planes of a trace, by name."""
    kernels: dict[str, list[tuple[str, Span]]] = {}
    for device, name, span in _kernels(planes):
        kernels.setdefault(device, []).append((name, span))
    return {device: _time(found) for device, found in sorted(kernels.items())}


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


def _kernels(planes: Iterable[ProfilePlane]) -> Iterator[tuple[str, str, Span]]:
    """Device, name and span of each kernel."""
    for plane in planes:
        gpu = _PLANE.match(plane.name)
        for line in plane.lines if gpu or plane.name == "/host:CPU" else ():
            if gpu and not line.name.startswith("Stream #"):
                continue
            for event in line.events:
                device = gpu[1] if gpu else _cpu(event)
                if device is not None:
                    start = round(event.start_ns)
                    yield device, event.name, (start, start + round(event.duration_ns))


def _cpu(event: ProfileEvent) -> str | None:
    """The CPU device on which an instruction of a program ran; None for other events."""
    if event.name.startswith(("end: ", "$")) or _AROUND_OTHERS.match(event.name):
        return None
    stats = dict(event.stats)
    return f"CPU:{stats['device_ordinal']}" if "hlo_op" in stats else None


def _time(kernels: Sequence[tuple[str, Span]]) -> DeviceTime:
    """The time of one device."""
    sent = _merge(span for name, span in kernels if _COLLECTIVE.match(name))
    computed = _merge(
        span for name, span in kernels if not (_COLLECTIVE.match(name) or _COPY.search(name))
    )
    start = min(span[0] for _, span in kernels)
    end = max(span[1] for _, span in kernels)
    exposed = _length(_merge([*sent, *computed])) - _length(computed)
    nanoseconds = end - start, _length(computed), _length(sent), exposed
    return DeviceTime(*(x / 1e9 for x in nanoseconds))


def _length(spans: Sequence[Span]) -> int:
    return sum(end - start for start, end in spans)


def _merge(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not overlap, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _fields(time: DeviceTime, num_steps: int) -> JsonObject:
    seconds = {**time._asdict(), "idle": time.idle}
    return {f"{name}_seconds": x / num_steps for name, x in seconds.items()}
