"""A modelled step as a picture: its lanes, and tables of what is sent and of what is assumed.

draw_page(modelled_picture(prediction))
"""

from collections.abc import Iterator

import jax

from jddp.workbench.modelled.links import START_SECONDS
from jddp.workbench.modelled.prediction import Prediction
from jddp.workbench.modelled.scaling import MEASURED_ERROR
from jddp.workbench.modelled.timeline import BACKWARD, FORWARD, UPDATE, Timeline
from jddp.workbench.modelled.transfer_groups import TransferGroup
from jddp.workbench.pictures.figures import in_gb, in_mb, in_ms
from jddp.workbench.pictures.lanes import EXPOSED, Band, Lanes, Pictured, SentBand, Table
from jddp.workbench.pictures.page import draw_page
from jddp.workbench.pictures.times import MODELLED


def draw_prediction(prediction: Prediction) -> str:
    """Draws a modelled step as one page of HTML."""
    return draw_page(modelled_picture(prediction))


def modelled_picture(prediction: Prediction) -> Pictured:
    """Returns the picture of a modelled step, with its tables."""
    return Pictured(
        verdict=prediction.verdict,
        note=f"Modelled, not measured: the order is XLA's for {prediction.target} (jax "
        f"{jax.__version__}), the times are computed from the assumptions below. Point at a bucket "
        "for its figures.",
        times=prediction.times,
        lanes=[_lanes(prediction)],
        tables=[
            _figures(prediction),
            *_scaling(prediction),
            _sent(prediction),
            _assumed(prediction),
        ],
    )


def _lanes(prediction: Prediction) -> Lanes:
    time = prediction.timeline
    return Lanes(
        kind=MODELLED,
        name=str(prediction.target),
        seconds=time.step_seconds,
        waited_seconds=prediction.times.exposed,
        computing=[*_phases(time), *_waits(time)],
        sent=[_lane_of(x) for x in prediction.groups],
    )


def _phases(time: Timeline) -> Iterator[Band]:
    for phase in (FORWARD, BACKWARD, UPDATE):
        spans = [(x.start, x.end) for x in time.spans if x.phase == phase]
        took = in_ms(sum(end - start for start, end in spans))
        yield Band(phase, f"{phase}: {took}", spans)


def _waits(time: Timeline) -> Iterator[Band]:
    for x in time.transfers:
        if x.waited_seconds > 0:
            title = f"waits {in_ms(x.waited_seconds)} for {x.name}"
            yield Band(EXPOSED, title, [(x.done_at - x.waited_seconds, x.done_at)])


def _lane_of(group: TransferGroup) -> SentBand:
    """A group on the network, with its windows if it is one of the plan."""
    times = [(x.ended_at - x.needed_seconds, x.ended_at) for x in group.transfers]
    if group.number is None:
        return SentBand(_title(group), times)
    windows = [(x.started_at, x.done_at) for x in group.transfers]
    return SentBand(_title(group), times, group.number, group.label.split()[-1], windows)


def _title(group: TransferGroup) -> str:
    named = f"{group.label}: {group.name}" if group.label else group.name
    return "\n".join(
        [
            f"{named} ({len(group.paths)} parameters)" if group.paths else named,
            f"{in_mb(group.bytes)} MB of {group.dtype}, {group.op} x {len(group.transfers)}",
            f"{group.choice.algorithm}, {in_gb(group.choice.bytes_per_second)} GB/s assumed",
            f"takes {in_ms(group.needed_seconds)}, waits {in_ms(group.waited_seconds)}: modelled",
        ]
    )


def _figures(prediction: Prediction) -> Table:
    memory = prediction.memory
    rows = [
        ["waits for gradients and parameters", f"{prediction.exposed_share:.2%}"],
        ["waits for anything else", f"{prediction.other_exposed_share:.2%}"],
        ["sent by each GPU", f"{in_mb(prediction.sent_bytes)} MB"],
        ["memory of a GPU", f"{memory.total / 1e9:.1f} of {memory.limit / 1e9:.1f} GB"],
    ]
    return Table("Modelled", ["", ""], rows, frozenset({1}))


def _scaling(prediction: Prediction) -> Iterator[Table]:
    rows = [
        [
            f"{x.num_devices:,}",
            in_ms(x.step_seconds),
            f"{x.waiting_share:.2%}",
            f"{x.efficiency:.1%}",
            x.origin,
        ]
        for x in prediction.scaling
    ]
    head = ["GPUs", "step", "waits", "efficiency", "program"]
    note = f"As many rows on each GPU. Modelled: {MEASURED_ERROR}."
    if rows:
        yield Table("Weak scaling", head, rows, frozenset({0, 1, 2, 3}), note)


def _sent(prediction: Prediction) -> Table:
    head = ["", "parameters", "MB", "dtype", "collective", "runs", "algorithm", "hops"]
    head += ["GPU sends MB", "host sends MB", "GB/s", "takes", "waits"]
    groups = prediction.groups
    moved = [in_mb(sum(x.sent_bytes for x in groups)), in_mb(sum(x.host_bytes for x in groups))]
    waited = in_ms(sum(x.waited_seconds for x in groups))
    total = ["sum", "", in_mb(sum(x.bytes for x in groups)), *[""] * 5, *moved, "", "", waited]
    return Table(
        "What is sent",
        head,
        [*map(_row, groups), total],
        frozenset({2, 5, *range(7, 13)}),
        colors=[x.number for x in groups],
    )


def _row(group: TransferGroup) -> list[str]:
    return [
        group.label or "other",
        group.name,
        in_mb(group.bytes),
        group.dtype,
        group.op,
        str(len(group.transfers)),
        group.choice.algorithm,
        str(group.choice.hops),
        in_mb(group.sent_bytes),
        in_mb(group.host_bytes),
        in_gb(group.choice.bytes_per_second),
        in_ms(group.needed_seconds),
        in_ms(group.waited_seconds),
    ]


def _assumed(prediction: Prediction) -> Table:
    gpu = prediction.target.gpu
    rows = [
        [
            name,
            f"{in_gb(x.bytes_per_second)} GB/s",
            f"{1e6 * x.hop_seconds:g} us a hop",
            x.source,
        ]
        for name, x in prediction.target.fabric.links.items()
    ]
    rates = {
        "products": f"{gpu.product_flops / 1e12:g} TFLOP/s",
        "convolutions": f"{gpu.convolution_flops / 1e12:g} TFLOP/s",
        "memory": f"{gpu.bytes_per_second / 1e12:g} TB/s",
    }
    rows += [[name, rate, "", "a share of the data sheet's peak"] for name, rate in rates.items()]
    starts = ", ".join(f"{1e6 * x:g} us" for x in START_SECONDS.values())
    rows.append(["start", "", starts, "of a collective, NCCL: Simple, LL"])
    return Table("What is assumed", ["", "rate", "latency", "source"], rows, frozenset({1, 2}))
