"""The kernels of each device in a trace of `jax.profiler`, and the time of the device in them.

In a trace a GPU is a plane "/device:GPU:0", whose lines "Stream #118(MemcpyD2H,Compute)" hold
kernels; other lines repeat them by layer and module. The kernels of all CPU devices are in the
plane "/host:CPU", each with the number of its device.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jax.profiler import ProfileEvent, ProfilePlane

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
        """The share of the communication beside which it computes."""
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
