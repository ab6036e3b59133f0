"""The time of steps, read from traces of `jax.profiler`: compute, exposed communication, idle.

    print(read_trace("runs/one"))               # of all processes that left a trace there
    read_trace(folder).devices["GPU:0"].exposed

Definitions follow Holistic Trace Analysis. A device communicates while a collective runs, which
includes its wait for other devices. It computes while any other kernel but a copy runs.
Communication is exposed while the device does not compute, and the rest of its time is idle.
https://hta.readthedocs.io/en/latest/source/features/temporal_breakdown.html

In a trace a GPU is a plane "/device:GPU:0", whose lines "Stream #118(MemcpyD2H,Compute)" hold
kernels; other lines repeat them by layer and module. The kernels of all CPU devices are in the
plane "/host:CPU", each with the number of its device.
"""

import functools
import itertools
import re
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData, ProfileEvent, ProfilePlane

from jddp.ground.errors import DataError
from jddp.ground.typing import JsonObject, Shown
from jddp.trainer.timing import DATA, STEP
from jddp.workbench.step_times import COMPUTING, EXPOSED, MEASURED, Band, Lanes, StepTimes, in_ms

Span = tuple[int, int]  # nanoseconds
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
        """The share of the communication during which the device computes."""
        return 1 - self.exposed / self.communication if self.communication else 0.0


class Kernels(NamedTuple):
    """The kernels of a device.

    Attributes:
      start: Nanosecond at which the first begins.
      end: Nanosecond at which the last ends.
      computed: Time in which one computes, as spans in order that do not overlap.
      sent: The same of each collective, by its name, in the order of their first runs.
    """

    start: int
    end: int
    computed: Sequence[Span]
    sent: dict[str, Sequence[Span]]

    @property
    def communicated(self) -> Sequence[Span]:
        """Time in which a collective runs."""
        return _merge(itertools.chain(*self.sent.values()))

    def exposed(self, sent: Sequence[Span]) -> Sequence[Span]:
        """The part of some spans in which nothing is computed."""
        edges = sorted([*_edges(sent, 0), *_edges(self.computed, 1)])
        running, found = [0, 0], list[Span]()
        for (time, kind, change), (following, *_) in itertools.pairwise(edges):
            running[kind] += change
            if running[0] and not running[1]:
                found.append((time, following))
        return _merge(found)

    @property
    def time(self) -> DeviceTime:
        """The time of the device."""
        sent = self.communicated
        parts = map(_length, (self.computed, sent, self.exposed(sent)))
        return DeviceTime(*(x / 1e9 for x in (self.end - self.start, *parts)))


def kernels_of(planes: Iterable[ProfilePlane]) -> dict[str, Kernels]:
    """The kernels of each device in the planes of a trace, by its name, such as "GPU:0"."""
    found: dict[str, list[tuple[str, Span]]] = {}
    for device, name, span in _kernels(planes):
        found.setdefault(device, []).append((name, span))
    return {device: _sorted(each) for device, each in sorted(found.items())}


def _sorted(kernels: Sequence[tuple[str, Span]]) -> Kernels:
    computed, sent = list[Span](), dict[str, list[Span]]()
    for name, span in sorted(kernels, key=lambda x: x[1]):
        if _COLLECTIVE.match(name):
            sent.setdefault(name, []).append(span)
        elif not _COPY.search(name):
            computed.append(span)
    start = min(span[0] for _, span in kernels)
    end = max(span[1] for _, span in kernels)
    return Kernels(start, end, _merge(computed), {name: _merge(x) for name, x in sent.items()})


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
                    yield device, _name(event), (start, start + round(event.duration_ns))


def _name(event: ProfileEvent) -> str:
    """The name of a kernel; NCCL runs the same one for many instructions, which are named too."""
    if event.name.startswith("nccl") and "hlo_op" in (stats := dict(event.stats)):
        return f"{event.name} of {stats['hlo_op']}"
    return event.name


def _cpu(event: ProfileEvent) -> str | None:
    """The CPU device on which an instruction of a program ran; None for other events."""
    if event.name.startswith(("end: ", "$")) or _AROUND_OTHERS.match(event.name):
        return None
    stats = dict(event.stats)
    return f"CPU:{stats['device_ordinal']}" if "hlo_op" in stats else None


def _edges(spans: Iterable[Span], kind: int) -> Iterator[tuple[int, int, int]]:
    """When each span of a kind begins and ends."""
    for start, end in spans:
        yield start, kind, 1
        yield end, kind, -1


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
        """Number of steps that times are averaged over; 1 for the whole trace if none is known."""
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

    def lanes(self) -> list[Lanes]:
        """The lanes of the devices that wait least and most."""
        waits = sorted(self.devices, key=lambda name: self.devices[name].exposed)
        return [_lanes(name, self.kernels[name]) for name in dict.fromkeys((waits[0], waits[-1]))]

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
    """Names, step numbers and seconds of the annotations of a run."""
    for plane in planes:
        if plane.name == "/host:CPU":
            for event in (event for line in plane.lines for event in line.events):
                if event.name in (STEP, DATA):
                    yield event.name, dict(event.stats).get("step_num", 0), event.duration_ns / 1e9


def _fields(time: DeviceTime, num_steps: int) -> JsonObject:
    seconds = {**time._asdict(), "idle": time.idle}
    return {f"{name}_seconds": x / num_steps for name, x in seconds.items()}


def _lanes(name: str, kernels: Kernels) -> Lanes:
    time, exposed = kernels.time, kernels.exposed(kernels.communicated)

    def seconds(spans: Sequence[Span]) -> list[tuple[float, float]]:
        return [((a - kernels.start) / 1e9, (b - kernels.start) / 1e9) for a, b in spans]

    computing = [
        Band(COMPUTING, f"computing: {in_ms(time.compute)} in all", seconds(kernels.computed)),
        Band(EXPOSED, f"waits for communication: {in_ms(time.exposed)} in all", seconds(exposed)),
    ]
    sent = [
        Band("sent", f"{each}: {in_ms(_length(runs) / 1e9)} in {len(runs)} runs", seconds(runs))
        for each, runs in kernels.sent.items()
    ]
    return Lanes(MEASURED, name, time.span, computing, sent)
