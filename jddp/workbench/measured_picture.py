"""A traced step as a picture: the lanes of devices, and tables of devices and collectives.

draw_page(measured_picture(read_trace("runs/one")))
"""

from collections.abc import Sequence

from jddp.workbench.kernels import Kernels, Span
from jddp.workbench.pictures.figures import in_ms
from jddp.workbench.pictures.lanes import (
    COMPUTING,
    EXPOSED,
    Band,
    Lanes,
    Pictured,
    SentBand,
    Table,
)
from jddp.workbench.pictures.times import MEASURED
from jddp.workbench.trace import Trace


def measured_picture(trace: Trace) -> Pictured:
    """Returns the picture of traced steps, of the devices that wait least and most."""
    waits = sorted(trace.devices, key=lambda name: trace.devices[name].exposed)
    drawn = [*dict.fromkeys((waits[0], waits[-1]))]
    few = f" Of {len(waits)} devices, those that wait least and most." if len(waits) > 2 else ""
    return Pictured(
        verdict=trace.verdict,
        note=f"Measured, not modelled: {trace.about}.{few} Point at a collective for its name.",
        times=trace.times,
        lanes=[_lanes(name, trace.kernels[name]) for name in drawn],
        tables=[_devices(trace), _collectives(trace, waits[-1])],
    )


def _lanes(name: str, kernels: Kernels) -> Lanes:
    time, exposed = kernels.time, kernels.exposed(kernels.communicated)

    def seconds(spans: Sequence[Span]) -> list[tuple[float, float]]:
        return [((a - kernels.start) / 1e9, (b - kernels.start) / 1e9) for a, b in spans]

    waits = f"waits for communication: {in_ms(time.exposed)} in all"
    return Lanes(
        kind=MEASURED,
        name=name,
        seconds=time.span,
        waited_seconds=time.exposed,
        computing=[
            Band(COMPUTING, f"computing: {in_ms(time.compute)} in all", seconds(kernels.computed)),
            Band(EXPOSED, waits, seconds(exposed)),
        ],
        sent=[
            SentBand(_title(each, runs), seconds(runs), number)
            for number, (each, runs) in enumerate(kernels.sent.items())
        ],
    )


def _title(name: str, runs: Sequence[Span]) -> str:
    return f"{name}: {in_ms(_length(runs))} in {len(runs)} runs, measured"


def _length(spans: Sequence[Span]) -> float:
    return sum(end - start for start, end in spans) / 1e9


def _devices(trace: Trace) -> Table:
    rows = []
    for name, x in trace.devices.items():
        parts = (x.span, x.compute, x.communication, x.exposed, x.idle)
        rows.append([name, *(in_ms(part / trace.num_steps) for part in parts)])
    head = ["", "step", "computing", "communication", "exposed", "idle"]
    return Table("Devices, measured", head, rows, frozenset(range(1, len(head))))


def _collectives(trace: Trace, device: str) -> Table:
    kernels = trace.kernels[device]
    rows = [
        [
            "",
            name,
            f"{len(runs) / trace.num_steps:g}",
            in_ms(_length(runs) / trace.num_steps),
            in_ms(_length(kernels.exposed(runs)) / trace.num_steps),
        ]
        for name, runs in kernels.sent.items()
    ]
    return Table(
        f"What {device} sends, measured",
        ["", "collective", "runs a step", "takes", "exposed"],
        rows,
        frozenset({2, 3, 4}),
        "In the order in which they begin. Their time includes the wait for other devices.",
        range(len(rows)),
    )
