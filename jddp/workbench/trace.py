"""The time of steps, read from traces of `jax.profiler`: compute, exposed communication, idle.

    print(read_trace("runs/one"))               # of all processes that left a trace there
    read_trace(folder).devices["GPU:0"].exposed

`jddp explain --trace` prints it, with `--target` next to modelled times of the run's config.

Definitions follow Holistic Trace Analysis. A device communicates while a collective runs, which
includes its wait for other devices. It computes while any other kernel but a copy runs.
Communication is exposed while the device does not compute, and the rest of its time is idle.
https://hta.readthedocs.io/en/latest/source/features/temporal_breakdown.html

In a trace a GPU is a plane "/device:GPU:0", whose lines "Stream #118(MemcpyD2H,Compute)" hold
kernels; other lines repeat them by layer and module. The kernels of all CPU devices are in the
plane "/host:CPU", each with the number of its device.
"""

import argparse
import json
import re
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData, ProfileEvent, ProfilePlane

from jddp.config.files import load_config
from jddp.ground.errors import DataError, ExitCode, UsageError, show
from jddp.ground.typing import JsonObject, Shown
from jddp.inspection.explain import Explanation, explain
from jddp.trainer.job.build import build
from jddp.trainer.loop import DATA, STEP
from jddp.workbench.described_tpus import described

MODELLED, MEASURED = "modelled", "measured"
_COLUMN = 21
_UNKNOWN = "not known"
Span = tuple[int, int]  # Start and end in nanoseconds.
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


def device_times(planes: Iterable[ProfilePlane]) -> dict[str, DeviceTime]:
    """The time of each device in the planes of a trace, by its name, such as "GPU:0"."""
    kernels: dict[str, list[tuple[str, Span]]] = {}
    for device, name, span in _kernels(planes):
        kernels.setdefault(device, []).append((name, span))
    return {device: _time_of(each) for device, each in sorted(kernels.items())}


def _time_of(kernels: Sequence[tuple[str, Span]]) -> DeviceTime:
    sent = _merge(span for name, span in kernels if _COLLECTIVE.match(name))
    others = [x for x in kernels if not _COLLECTIVE.match(x[0])]
    computed = _merge(span for name, span in others if not _COPY.search(name))
    # A device that is busy and does not compute sends, and nothing hides that.
    busy = _length(_merge([*sent, *computed]))
    span = max(end for _, (_, end) in kernels) - min(start for _, (start, _) in kernels)
    parts = span, _length(computed), _length(sent), busy - _length(computed)
    return DeviceTime(*(x / 1e9 for x in parts))


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


def in_ms(seconds: float) -> str:
    """A time in milliseconds, with their unit."""
    return f"{1e3 * seconds:,.2f} ms"


class StepTimes(NamedTuple):
    """Where the time of a step goes, in seconds, on average over devices.

    Attributes:
      kind: `MODELLED` or `MEASURED`.
      step: Time of the step.
      compute: Part in which a device computes.
      exposed: Part in which it communicates and does not compute.
      idle: Part in which it does neither; None if that is not known.
      data_wait: Time in which the host waits for a batch; None if that is not known.
    """

    kind: str
    step: float
    compute: float
    exposed: float
    idle: float | None = None
    data_wait: float | None = None

    def cells(self) -> Iterator[str]:
        """A cell for each row of `ROWS`."""
        yield in_ms(self.step)
        for part in (self.compute, self.exposed, self.idle, self.data_wait):
            yield _UNKNOWN if part is None else f"{in_ms(part)} {part / self.step:7.2%}"


ROWS = ("time", "computing", "waiting for communication", "idle", "host waiting for its batch")


def times_as_text(times: Sequence[StepTimes]) -> str:
    """A table with a column for each; it leaves out rows that no column knows."""
    head = ["", *(x.kind for x in times)]
    rows = zip(ROWS, *(x.cells() for x in times), strict=True)
    known = [row for row in rows if {*row[1:]} != {_UNKNOWN}]
    return "\n".join(
        f"{name:<27}" + "".join(f"{x:>{_COLUMN}}" for x in cells) for name, *cells in (head, *known)
    )


_ROW = "{:<18}{:>11}{:>11}{:>16}{:>11}{:>11}"


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
        about = "The trace has no steps of a run of jddp: times are of all of it"
        if self.steps:
            about = f"steps {self.steps[0]} to {self.steps[-1]}, of which times are means"
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


def run_explain(arguments: argparse.Namespace) -> int:
    """Prints the report of `jddp explain`; returns its exit code."""
    trace = None if arguments.trace is None else read_trace(arguments.trace)
    step = None if arguments.target is None else _modelled(arguments)
    show(json.dumps(_as_json(trace, step)) if arguments.json else _as_text(trace, step))
    return ExitCode.DONE


def _modelled(arguments: argparse.Namespace) -> Explanation:
    config, _ = load_config(_configs(arguments), arguments.overrides)
    gpu, topology, links = arguments.target, arguments.topology or "1x8", arguments.link
    job = build(config, needs_data=False, mesh=described(gpu, topology, links).mesh())
    options = {"topology": topology, "links": links, "scaling": arguments.scaling}
    return explain(job.ddp, job.batch_spec, target=gpu, **options)


def _configs(arguments: argparse.Namespace) -> list[str]:
    """The configs that are named, or else the config of the traced run."""
    if arguments.config or arguments.trace is None:
        return list(arguments.config)
    own = arguments.trace / "config.yaml"
    if not own.is_file():
        raise UsageError(f"{own} is not there. Name the config of the traced step by --config.")
    return [str(own)]


def _as_json(trace: Trace | None, step: Explanation | None) -> JsonObject:
    if step is None:
        assert trace is not None  # One of them is there.
        return trace.as_json()
    return step.as_json() | ({} if trace is None else {"measured": trace.as_json()})


def _as_text(trace: Trace | None, step: Explanation | None) -> str:
    parts = [str(x) for x in (trace, step) if x is not None]
    if trace is not None and step is not None:
        parts.insert(1, times_as_text([trace.times, step.prediction.times]))
    return "\n\n".join(parts)
