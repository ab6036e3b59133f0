"""The timeline of a modelled step as a picture: SVG, with lanes for computing and the network.

Below them, for each bucket, is the time between its start and the moment at which computing needs
it: what takes no longer than that is hidden.
"""

import math
from collections.abc import Iterable, Iterator
from html import escape

from jddp.inspection.modelled.prediction import Prediction
from jddp.inspection.modelled.timeline import (
    BACKWARD,
    FORWARD,
    UPDATE,
    Timeline,
    in_gb,
    in_mb,
    in_ms,
)
from jddp.inspection.modelled.transfer_groups import TransferGroup

WIDTH, LEFT, RIGHT = 1000, 84, 22
_LANE = 34
_WINDOW = 15
_COMPUTING, _NETWORK, _WINDOWS = 40, 86, 134
_TURN = 137.508  # degrees between the colours of neighbours: the golden angle

_STYLE = """
svg { --s: 60%; --l: 46%; --text: #222; --line: #ccc; font: 13px system-ui, sans-serif }
svg text { fill: var(--text) }
.forward { fill: #a9bdd2 } .backward { fill: #7b93ad } .update { fill: #c9b8a2 }
.sent { fill: hsl(var(--h) var(--s) var(--l)) } .other { fill: #888 }
.window { fill: hsl(var(--h) var(--s) var(--l)); opacity: .3 }
.tick { stroke: var(--line) }
.exposed { fill: url(#hatch) } .hatch { stroke: #d00; stroke-width: 3 }
@media (prefers-color-scheme: dark) { @media screen {
  svg { --s: 55%; --l: 62%; --text: #ddd; --line: #444 }
  .forward { fill: #5b7690 } .backward { fill: #3f566d } .update { fill: #756651 }
  .window { opacity: .4 } .hatch { stroke: #f66 }
} }
"""


def drawing(prediction: Prediction) -> str:
    """Returns the lanes of a modelled step as SVG, which can stand alone."""
    time = prediction.timeline
    scale = _Scale(time.step_seconds)
    windows = _Windows(scale)
    sent = [_group(x, scale, windows) for x in prediction.groups]
    height = _WINDOWS + windows.height + 30
    parts = [
        *_axis(scale, height - 26),
        *_computing(time, scale),
        f'<text x="0" y="{_NETWORK + 22}">network</text>',
        f'<text x="0" y="{_WINDOWS + 12}">until needed</text>',
        *sent,
        *_legend(height - 8, f"waiting: {in_ms(time.step_seconds - time.compute_seconds)}"),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>modelled: {escape(prediction.verdict)}</title><style>{_STYLE}</style>"
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path class="hatch" d="M0,0v6"/></pattern></defs>'
        f"{''.join(parts)}</svg>"
    )


class _Scale:
    """Seconds of the step, as places of the drawing."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._factor = (WIDTH - LEFT - RIGHT) / seconds

    def x(self, seconds: float) -> float:
        return LEFT + self._factor * seconds

    def path(self, times: Iterable[tuple[float, float]], y: float, height: float) -> str:
        """Boxes over stretches of time in order; those that nearly touch are one."""
        boxes: list[list[float]] = []
        for start, end in times:
            left, right = self.x(start), max(self.x(end), self.x(start) + 0.8)
            if boxes and left - boxes[-1][1] < 0.3:
                boxes[-1][1] = max(right, boxes[-1][1])
            else:
                boxes.append([left, right])
        return "".join(f"M{a:.1f},{y:g}h{b - a:.1f}v{height:g}H{a:.1f}z" for a, b in boxes)


class _Windows:
    """Rows for stretches of time that overlap: each goes to the first row that is free."""

    def __init__(self, scale: _Scale) -> None:
        self._scale = scale
        self._ends: list[float] = []

    @property
    def height(self) -> int:
        return _WINDOW * max(1, len(self._ends))

    def top(self, start: float, end: float, room: float) -> int:
        """The top of the row for a stretch of time, with room for words behind it."""
        left = self._scale.x(start)
        free = [row for row, taken in enumerate(self._ends) if taken <= left]
        row = free[0] if free else len(self._ends)
        self._ends[row : row + 1] = [max(self._scale.x(end), left + 1) + room]
        return _WINDOWS + _WINDOW * row


def _axis(scale: _Scale, bottom: float) -> Iterator[str]:
    """Vertical lines at whole numbers of milliseconds, or of parts of one."""
    rough = 1e3 * scale.seconds / 8
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * x for x in (1, 2, 5, 10) if power * x >= rough)
    for number in range(math.floor(1e3 * scale.seconds / step) + 1):
        x = scale.x(number * step / 1e3)
        yield f'<path class="tick" d="M{x:.1f},24V{bottom:g}"/>'
        unit = " ms" if number == 0 else ""
        anchor = "end" if x > WIDTH - 40 else "start"
        yield f'<text x="{x:.1f}" y="18" text-anchor="{anchor}">{number * step:g}{unit}</text>'


def _computing(time: Timeline, scale: _Scale) -> Iterator[str]:
    yield f'<text x="0" y="{_COMPUTING + 22}">computing</text>'
    for phase in (FORWARD, BACKWARD, UPDATE):
        spans = [x for x in time.spans if x.phase == phase]
        path = scale.path([(x.start, x.end) for x in spans], _COMPUTING, _LANE)
        took = in_ms(sum(x.end - x.start for x in spans))
        yield f'<path class="{phase}" d="{path}"><title>{phase}: {took}, modelled</title></path>'
    for x in time.transfers:
        if x.waited_seconds > 0:
            path = scale.path([(x.done_at - x.waited_seconds, x.done_at)], _COMPUTING, _LANE)
            title = f"waits {in_ms(x.waited_seconds)} for {escape(x.name)}, modelled"
            yield f'<path class="exposed" d="{path}"><title>{title}</title></path>'


def _group(group: TransferGroup, scale: _Scale, windows: _Windows) -> str:
    """A group on the network, and its windows if it is one of the plan."""
    times = [(x.ended_at - x.needed_seconds, x.ended_at) for x in group.transfers]
    kind = "other" if group.number is None else "sent"
    parts = [f'<path class="{kind}" d="{scale.path(times, _NETWORK, _LANE)}"/>']
    if group.number is not None:
        parts += _windows(group, scale, windows)
    return f"<g{hue(group)}><title>{escape(_title(group))}</title>{''.join(parts)}</g>"


def _windows(group: TransferGroup, scale: _Scale, windows: _Windows) -> Iterator[str]:
    """The times until each run is needed, with the number of the bucket behind the first."""
    boxes = []
    for number, x in enumerate(group.transfers):
        label = group.label.split()[-1] if number == 0 else ""
        y = windows.top(x.started_at, x.done_at, 2 + 9 * len(label))
        boxes.append(scale.path([(x.started_at, x.done_at)], y, _WINDOW - 2))
        if label:
            left = max(scale.x(x.done_at), scale.x(x.started_at) + 1) + 2
            yield f'<text x="{left:.1f}" y="{y + 11}" font-size="12">{label}</text>'
    yield f'<path class="window" d="{"".join(boxes)}"/>'


def _legend(y: float, waiting: str) -> Iterator[str]:
    kinds = {
        "forward": "forward",
        "backward": "backward",
        "update": "update",
        "exposed": f"{waiting}, modelled",
    }
    for number, (kind, text) in enumerate(kinds.items()):
        x = LEFT + 110 * number
        yield f'<path class="{kind}" d="M{x},{y - 11:g}h12v12h-12z"/>'
        yield f'<text x="{x + 17}" y="{y:g}">{text}</text>'


def hue(group: TransferGroup) -> str:
    """The color of a group of the plan, as an attribute; the styles make it light or dark."""
    return "" if group.number is None else f' style="--h:{_TURN * group.number % 360:.0f}"'


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
