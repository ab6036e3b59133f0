"""Where the time of a step goes, modelled or measured: as a table, and as a picture.

    print(times_as_text([trace.times, prediction.times]))
    draw_page(str(trace), trace.lanes())         # HTML that loads nothing

Both follow the definitions of Holistic Trace Analysis: a step computes, or communicates and
does not compute, which is exposed, or does neither, which is idle.
https://hta.readthedocs.io/en/latest/source/features/temporal_breakdown.html
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from jddp.workbench.pages import make_page

MODELLED, MEASURED = "modelled", "measured"
COMPUTING, EXPOSED = "computing", "exposed"
_COLUMN = 21
_UNKNOWN = "not known"
Stretches = Sequence[tuple[float, float]]  # seconds from the beginning


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
    """A table with a column for each, of those rows that one of them knows."""
    head = ["", *(x.kind for x in times)]
    rows = zip(ROWS, *(x.cells() for x in times), strict=True)
    known = [row for row in rows if {*row[1:]} != {_UNKNOWN}]
    return "\n".join(
        f"{name:<27}" + "".join(f"{x:>{_COLUMN}}" for x in cells) for name, *cells in (head, *known)
    )


class Band(NamedTuple):
    """Stretches of a lane that are drawn in one style.

    Attributes:
      style: A phase in the computing lane, "forward", "backward" or "update", `COMPUTING` for an
        unknown phase, or `EXPOSED`, where it waits; in the other lane "sent" or "other".
      title: Words for them.
      times: When they begin and end, in order.
    """

    style: str
    title: str
    times: Stretches


@dataclass(frozen=True)
class Lanes:
    """The computing and the communication of one device, over time.

    Attributes:
      kind: `MODELLED` or `MEASURED`.
      name: Name of the device, or of all devices.
      seconds: Length of the lanes.
      computing: The computing lane.
      sent: The communication lane: a band for each collective.
    """

    kind: str
    name: str
    seconds: float
    computing: Sequence[Band]
    sent: Sequence[Band]


WIDTH, LEFT, RIGHT = 1000, 84, 30
_LANE, _COMPUTING, _NETWORK, _HEIGHT = 34, 40, 86, 160
_TURN = 137.508  # degrees between the colours of neighbours: the golden angle
_STYLE = """
body { max-width: 1200px } pre { overflow-x: auto } .wide svg { display: block; min-width: 900px }
svg { --s: 60%; --l: 46%; --text: #222; --line: #ccc; font: 13px system-ui, sans-serif }
svg text { fill: var(--text) }
.forward { fill: #a9bdd2 } .backward, .computing { fill: #7b93ad } .update { fill: #c9b8a2 }
.sent { fill: hsl(var(--h) var(--s) var(--l)) } .other { fill: #888 }
.tick { stroke: var(--line) }
.exposed { fill: url(#hatch) } .hatch { stroke: #d00; stroke-width: 3 }
@media (prefers-color-scheme: dark) { @media screen {
  svg { --s: 55%; --l: 62%; --text: #ddd; --line: #444 }
  .forward { fill: #5b7690 } .backward, .computing { fill: #3f566d } .update { fill: #756651 }
  .hatch { stroke: #f66 }
} }
@media print { .wide svg { min-width: 0 } }
"""


def draw_page(text: str, lanes: Sequence[Lanes]) -> str:
    """Returns a page of HTML with the lanes of devices above a text."""
    note = '<p class="note">Point at a bucket or a collective for its figures.</p>'
    drawings = "\n".join(f'<div class="wide">{drawing(x)}</div>' for x in lanes)
    kinds = " and ".join(dict.fromkeys(x.kind for x in lanes))
    body = f"<h1>A step, {kinds}</h1>\n{note}\n{drawings}\n<pre>{escape(text)}</pre>"
    return make_page(f"A step, {kinds}", body, style=_STYLE)


def drawing(lanes: Lanes) -> str:
    """Returns the lanes of a device as SVG: computing, communication, and hatched the exposed."""
    factor = (WIDTH - LEFT - RIGHT) / lanes.seconds
    parts = [
        *_axis(lanes.seconds, factor),
        f'<text x="0" y="{_COMPUTING + 22}">computing</text>',
        *(_band(x, _COMPUTING, factor, lanes.kind) for x in lanes.computing),
        f'<text x="0" y="{_NETWORK + 22}">network</text>',
        *(_band(x, _NETWORK, factor, lanes.kind, i) for i, x in enumerate(lanes.sent)),
        *_legend(lanes),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {_HEIGHT}" role="img">'
        f"<title>{lanes.kind}: {escape(lanes.name)}</title>"
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path class="hatch" d="M0,0v6"/></pattern></defs>'
        f"{''.join(parts)}</svg>"
    )


def _axis(seconds: float, factor: float) -> Iterator[str]:
    """Vertical lines at whole numbers of milliseconds, or of parts of one."""
    rough = 1e3 * seconds / 8
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * x for x in (1, 2, 5, 10) if power * x >= rough)
    for number in range(math.floor(1e3 * seconds / step) + 1):
        x = LEFT + factor * number * step / 1e3
        yield f'<path class="tick" d="M{x:.1f},24V{_HEIGHT - 26}"/>'
        unit = " ms" if number == 0 else ""
        anchor = "end" if x > WIDTH - 40 else "start"
        yield f'<text x="{x:.1f}" y="18" text-anchor="{anchor}">{number * step:g}{unit}</text>'


def _band(band: Band, y: float, factor: float, kind: str, number: int = 0) -> str:
    """Boxes over stretches of time in order; those that nearly touch are one."""
    boxes: list[list[float]] = []
    for start, end in band.times:
        left = LEFT + factor * start
        right = max(LEFT + factor * end, left + 0.8)
        if boxes and left - boxes[-1][1] < 0.3:
            boxes[-1][1] = max(right, boxes[-1][1])
        else:
            boxes.append([left, right])
    path = "".join(f"M{a:.1f},{y:g}h{b - a:.1f}v{_LANE}H{a:.1f}z" for a, b in boxes)
    hue = f' style="--h:{_TURN * number % 360:.0f}"' if band.style == "sent" else ""
    title = f"<title>{escape(band.title)}, {kind}</title>"
    return f'<path class="{band.style}"{hue} d="{path}">{title}</path>'


def _legend(lanes: Lanes) -> Iterator[str]:
    styles = dict.fromkeys([*(x.style for x in lanes.computing), EXPOSED])
    y = _HEIGHT - 8
    for number, style in enumerate(styles):
        x = LEFT + 110 * number
        yield f'<path class="{style}" d="M{x},{y - 11:g}h12v12h-12z"/>'
        words = "waiting for communication" if style == EXPOSED else style
        yield f'<text x="{x + 17}" y="{y:g}">{words}</text>'
    yield f'<text x="{WIDTH}" y="{y:g}" text-anchor="end">{escape(lanes.name)}</text>'
