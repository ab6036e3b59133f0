"""Reads from a trace of `jax.profiler` which kernels ran at the same time.

    for device, covered in shares(read_trace(path)).items():
        print(device, covered.share)

In the trace a GPU is a process named "/device:GPU:0", and its streams are threads named
"Stream #118(MemcpyD2H,Compute)"; other threads repeat the streams by layer and module.
A trace of CPUs has no such process. https://github.com/marin-community/marin/issues/3345
"""

import gzip
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from jddp.typing import JsonObject

Span = tuple[float, float]
_COLLECTIVE = re.compile(r"nccl|all-?_?reduce", re.IGNORECASE)
_COPY = re.compile(r"memcpy|memset", re.IGNORECASE)


class Covered(NamedTuple):
    """Time of a device's collectives, and the part of it beside other kernels; microseconds.

    Attributes:
      collectives: Time in which a collective ran.
      beside: Part of it in which another kernel ran too.
    """

    collectives: float
    beside: float

    @property
    def share(self) -> float:
        """The part beside other kernels, as a fraction."""
        return self.beside / self.collectives


def read_trace(path: Path) -> list[JsonObject]:
    """The events of a `*.trace.json.gz`."""
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def shares(events: Iterable[JsonObject]) -> dict[str, Covered]:
    """The times of each device, by name; empty if the trace has no streams of devices."""
    events = list(events)
    devices = _names(events, "process_name", r"/device:(GPU:\d+).*")
    streams = _names(events, "thread_name", r"(Stream #.*)")
    kernels: dict[str, tuple[list[Span], list[Span]]] = {}
    for event in events:
        pid, tid = event.get("pid"), event.get("tid")
        if event.get("ph") == "X" and (pid,) in devices and (pid, tid) in streams:
            span = event["ts"], event["ts"] + event.get("dur", 0)
            collectives, others = kernels.setdefault(devices[pid,], ([], []))
            if _COLLECTIVE.search(event["name"]):
                collectives.append(span)
            elif not _COPY.search(event["name"]):
                others.append(span)
    return {device: _share(*spans) for device, spans in sorted(kernels.items())}


def _names(events: Iterable[JsonObject], kind: str, pattern: str) -> dict[tuple[object, ...], str]:
    """Names of processes by (pid,), or of threads by (pid, tid), that match."""
    found: dict[tuple[object, ...], str] = {}
    for event in events:
        if event.get("ph") == "M" and event.get("name") == kind:
            name = re.fullmatch(pattern, event["args"]["name"])
            place = [event[key] for key in ("pid", "tid") if key in event]
            place = place[:1] if kind == "process_name" else place
            found |= {tuple(place): name[1]} if name else {}
    return found


def _share(collectives: Sequence[Span], others: Sequence[Span]) -> Covered:
    sent, computed = _merge(collectives), _merge(others)
    beside, i = 0.0, 0
    for start, end in sent:
        while i < len(computed) and computed[i][1] <= start:
            i += 1
        for a, b in computed[i:]:
            if a >= end:
                break
            beside += min(end, b) - max(start, a)
    return Covered(sum(end - start for start, end in sent), beside)


def _merge(spans: Sequence[Span]) -> list[Span]:
    """The same time as spans that do not overlap, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
