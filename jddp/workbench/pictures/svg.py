"""The lanes of a step as SVG: computing, communication, and hatched what is exposed.

Below them, for each bucket, is the time between its start and the moment at which computing needs
it, where it is known: what takes no longer than that is hidden.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape

from jddp.workbench.pictures.figures import in_ms
from jddp.workbench.pictures.lanes import EXPOSED, Lanes, SentBand, Stretches

WIDTH, LEFT, RIGHT = 1000, 84, 30
_LANE = 34
_WINDOW = 15
_MOST_ROWS = 20  # with labels
_COMPUTING, _NETWORK, _WINDOWS = 40, 86, 134
_TURN = 137.508  # degrees between the colours of neighbours: the golden angle

_STYLE = """
svg { --s: 60%; --l: 46%; --text: #222; --line: #ccc; font: 13px system-ui, sans-serif }
svg text { fill: var(--text) }
.forward { fill: #a9bdd2 } .backward, .computing { fill: #7b93ad } .update { fill: #c9b8a2 }
.sent { fill: hsl(var(--h) var(--s) var(--l)) } .other { fill: #888 }
.window { fill: hsl(var(--h) var(--s) var(--l)); opacity: .3 }
.tick { stroke: var(--line) }
.exposed { fill: url(#hatch) } .hatch { stroke: #d00; stroke-width: 3 }
@media (prefers-color-scheme: dark) { @media screen {
  svg { --s: 55%; --l: 62%; --text: #ddd; --line: #444 }
  .forward { fill: #5b7690 } .backward, .computing { fill: #3f566d } .update { fill: #756651 }
  .window { opacity: .4 } .hatch { stroke: #f66 }
} }
"""


def drawing(lanes: Lanes) -> str:
    """Returns the lanes of a device as SVG, which can stand alone."""
    scale = _Scale(lanes.seconds)
    sent, (rows, num_rows) = lanes.sent, _rows(lanes.sent, scale)
    if num_rows > _MOST_ROWS:  # Labels take more room than what they name: titles have to do.
        sent = [x._replace(label="") for x in sent]
        rows, num_rows = _rows(sent, scale)
    height = _WINDOWS + _WINDOW * num_rows + 30
    named = f'<text x="0" y="{_WINDOWS + 12}">until needed</text>' if num_rows else ""
    parts = [
        *_axis(scale, height - 26),
        *_computing(lanes, scale),
        f'<text x="0" y="{_NETWORK + 22}">network</text>',
        named,
        *(_sent(x, tops, scale) for x, tops in zip(sent, rows, strict=True)),
        *_legend(lanes, height - 8),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>{lanes.kind}: {escape(lanes.name)}</title><style>{_STYLE}</style>"
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path class="hatch" d="M0,0v6"/></pattern></defs>'
        f"{''.join(parts)}</svg>"
    )


def hue(number: int | None) -> str:
    """The color of a number, as an attribute; the styles make it light or dark."""
    return "" if number is None else f' style="--h:{_TURN * number % 360:.0f}"'


class _Scale:
    """Seconds of the step, as places of the drawing."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._factor = (WIDTH - LEFT - RIGHT) / seconds

    def x(self, seconds: float) -> float:
        return LEFT + self._factor * seconds

    def path(self, times: Stretches, y: float, height: float) -> str:
        """Boxes over stretches of time in order; those that nearly touch are one."""
        boxes: list[list[float]] = []
        for start, end in times:
            left, right = self.x(start), max(self.x(end), self.x(start) + 0.8)
            if boxes and left - boxes[-1][1] < 0.3:
                boxes[-1][1] = max(right, boxes[-1][1])
            else:
                boxes.append([left, right])
        return "".join(f"M{a:.1f},{y:g}h{b - a:.1f}v{height:g}H{a:.1f}z" for a, b in boxes)


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


def _computing(lanes: Lanes, scale: _Scale) -> Iterator[str]:
    yield f'<text x="0" y="{_COMPUTING + 22}">computing</text>'
    for band in lanes.computing:
        path = scale.path(band.times, _COMPUTING, _LANE)
        title = f"<title>{escape(band.title)}, {lanes.kind}</title>"
        yield f'<path class="{band.style}" d="{path}">{title}</path>'


def _rows(sent: Sequence[SentBand], scale: _Scale) -> tuple[list[list[int]], int]:
    """Rows for the windows of each collective, as few as there may be, and their number."""
    rows, ends = [[0] * len(x.windows) for x in sent], list[float]()
    windows = ((*x, i, run) for i, each in enumerate(sent) for run, x in enumerate(each.windows))
    for start, end, i, run in sorted(windows):
        free = (row for row, taken in enumerate(ends) if taken <= scale.x(start))
        rows[i][run] = row = next(free, len(ends))
        # Twice a digit's width, so that a label stands beside its own bar and away from the next.
        room = 2 + 14 * len(sent[i].label if run == 0 else "")
        ends[row : row + 1] = [max(scale.x(end), scale.x(start) + 1) + room]
    return rows, len(ends)


def _sent(sent: SentBand, rows: Sequence[int], scale: _Scale) -> str:
    """A collective on the network, and its windows if they are known."""
    style = "other" if sent.number is None else "sent"
    parts = [f'<path class="{style}" d="{scale.path(sent.times, _NETWORK, _LANE)}"/>']
    if sent.windows:
        parts += _windows(sent, rows, scale)
    return f"<g{hue(sent.number)}><title>{escape(sent.title)}</title>{''.join(parts)}</g>"


def _windows(sent: SentBand, rows: Sequence[int], scale: _Scale) -> Iterator[str]:
    """The times until each run is needed, with the label behind the first."""
    tops = [_WINDOWS + _WINDOW * row for row in rows]
    boxes = (scale.path([x], top, _WINDOW - 2) for x, top in zip(sent.windows, tops, strict=True))
    yield f'<path class="window" d="{"".join(boxes)}"/>'
    if sent.label:
        start, end = sent.windows[0]
        left = max(scale.x(end), scale.x(start) + 1) + 2
        yield f'<text x="{left:.1f}" y="{tops[0] + 11}" font-size="12">{sent.label}</text>'


def _legend(lanes: Lanes, y: float) -> Iterator[str]:
    styles = dict.fromkeys(x.style for x in lanes.computing if x.style != EXPOSED)
    texts = {style: style for style in styles}
    texts[EXPOSED] = f"waiting: {in_ms(lanes.waited_seconds)}, {lanes.kind}"
    for number, (style, text) in enumerate(texts.items()):
        x = LEFT + 110 * number
        yield f'<path class="{style}" d="M{x},{y - 11:g}h12v12h-12z"/>'
        yield f'<text x="{x + 17}" y="{y:g}">{text}</text>'
    yield f'<text x="{WIDTH}" y="{y:g}" text-anchor="end">{escape(lanes.name)}</text>'
