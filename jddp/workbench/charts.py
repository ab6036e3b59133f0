"""Charts of a run as SVG: curves over its steps, and the parts of a whole as a bar.

    both = [Series("train", steps, losses, is_smoothed=True), Series("eval", *evaluations)]
    curves(both, "loss", "nats")
    bar({"data wait": 0.02, "computing": 0.1}, "s")
    lanes({"restarts": [Mark(400, "resumed from step 300")]}, last=1000)

A figure loads nothing, is light or dark as its page, prints, and can be read on a phone. A page
with charts has `STYLE` and `SCRIPT` once; the script only shows the values under the pointer.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple, TypeGuard

MOST_POINTS = 1_000
LARGEST = 1e30  # A larger value counts as infinite: a drawing would have no scale.


def is_drawable(value: object) -> TypeGuard[float]:
    """Whether a value is a number that can be drawn."""
    return isinstance(value, int | float) and -LARGEST < value < LARGEST  # False for NaN.


class At(NamedTuple):
    """A value of a curve.

    Attributes:
      value: The value.
      step: The step.
    """

    value: float
    step: int


class Thinned:
    """A curve that is read value by value.

    Attributes:
      steps: The last step of each point.
      values: The mean of the values of each point.
      low: The smallest of them.
      high: The largest of them.
      smallest: The first of the smallest values, with its step; None without a finite value.
      largest: The first of the largest values; None without a finite value.
      last: The last value; None if it was not finite.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.smallest: At | None = None
        self.largest: At | None = None
        self.last: float | None = None
        self._size = 1  # number of values of a point
        self._open: list[float] = []  # values of the next point
        self._last_step = 0

    def add(self, step: int, value: float | None) -> None:
        """Adds a value; None stands for a value that is not finite."""
        if not is_drawable(value):
            self.last = None
            return
        self.last, self._last_step = value, step
        if self.smallest is None or value < self.smallest.value:
            self.smallest = At(value, step)
        if self.largest is None or value > self.largest.value:
            self.largest = At(value, step)
        self._open.append(value)
        if len(self._open) == self._size:
            self._close(step)

    def finish(self) -> None:
        """Makes a point of the last values, which are fewer than other points have."""
        if self._open:
            self._close(self._last_step)

    def _close(self, step: int) -> None:
        values, self._open = self._open, []
        self.steps.append(step)
        self.values.append(math.fsum(values) / len(values))
        self.low.append(min(values))
        self.high.append(max(values))
        if len(self.steps) == MOST_POINTS:
            self._halve()

    def _halve(self) -> None:
        self.steps = self.steps[1::2]
        pairs = zip(self.values[::2], self.values[1::2], strict=True)
        self.values = [(a + b) / 2 for a, b in pairs]
        self.low = [*map(min, self.low[::2], self.low[1::2])]
        self.high = [*map(max, self.high[::2], self.high[1::2])]
        self._size *= 2


WIDTH, HEIGHT = 520, 250
LANE = 22
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 10, 24
COLORS = 8
_DECADES = 2  # Positive values that span as many powers of ten get a logarithmic axis.
_SMOOTHED_FROM = 40  # Minimum number of values of a curve that is smoothed.
_SMOOTHED_OVER = 1 / 40  # Share of the values over which a curve is smoothed.

STYLE = """
.chart { --c0: #2563a8; --c1: #d9730d; --c2: #2f8f5b; --c3: #a63d8f; --c4: #7a6a00; --c5: #b8303c;
  --c6: #138496; --c7: #6b5bd0; --grid: #8883; margin: 0; min-width: 0; break-inside: avoid }
.chart figcaption { font-size: .9em } .chart figcaption span { display: inline-block }
.chart figcaption b { margin-right: .6em }
.chart i { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 .7em;
  border-radius: 2px; background: var(--c) }
.chart svg { display: block; width: 100%; height: auto; font: 13.5px system-ui, sans-serif }
.chart text { fill: currentColor; opacity: .75 }
.chart path { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round }
.chart .raw { stroke-width: 1; opacity: .4 }
.chart .band { fill: var(--c); stroke: none; opacity: .18 }
.chart .dots { stroke-width: 6; stroke-linecap: round } .chart .dashed { stroke-dasharray: 6 4 }
.chart .grid { stroke: var(--grid); stroke-width: 1 } .chart .cursor { stroke: currentColor;
  stroke-width: 1; opacity: .5 }
.chart output { display: block; font-size: .85em; min-height: 1.4em; opacity: .75;
  font-variant-numeric: tabular-nums }
.chart.lanes { overflow-x: auto } .chart.lanes svg { min-width: 640px }
.chart.lanes .dots { stroke-width: 9 }
.chart .parts { display: flex; height: 1.8em; border-radius: 4px; overflow: hidden }
.chart .parts span { background: var(--c); min-width: 1px }
@media (prefers-color-scheme: dark) { @media screen { .chart { --c0: #6aaaf0; --c1: #f2a154;
  --c2: #63c68f; --c3: #dd86cb; --c4: #cdbb45; --c5: #f07f88; --c6: #56c2d3; --c7: #a79bf5 } } }
"""

SCRIPT = """
for (const figure of document.querySelectorAll('.curves')) {
  const svg = figure.querySelector('svg'), shown = figure.querySelector('output')
  const line = svg.querySelector('.cursor')
  const [left, width, from, to] = svg.dataset.x.split(' ').map(Number)
  let series
  svg.addEventListener('pointermove', event => {
    series ??= JSON.parse(figure.querySelector('script').textContent)
    const box = svg.getBoundingClientRect()
    const at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width
    const step = from + (at - left) / width * (to - from)
    const words = series.map(({name, steps, values}) => {
      let low = 0, high = steps.length - 1
      while (low < high) {
        const middle = (low + high) >> 1
        if (steps[middle] + (steps[middle + 1] ?? Infinity) < 2 * step) low = middle + 1
        else high = middle
      }
      const value = values[low].toLocaleString('en', {maximumSignificantDigits: 5})
      return `${name} ${value} at ${steps[low].toLocaleString('en')}`
    })
    const x = Math.min(left + width, Math.max(left, at))
    line.setAttribute('d', `M${x},0V${svg.viewBox.baseVal.height}`)
    shown.textContent = words.join(', ')
  })
}
"""


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
      name: Name in the legend.
      steps: Steps, in order.
      values: The value at each step, all finite.
      low: The smallest of the values that a point stands for, if it stands for several; else ().
      high: The largest of them, or ().
      is_smoothed: Whether a smoothed line is drawn over the values, if there are enough of them.
      is_dotted: Whether each value is a dot on the line, as for a few evaluations.
    """

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    is_smoothed: bool = False
    is_dotted: bool = False


def series_of(name: str, curve: Thinned, **options: bool) -> Series:
    """A curve that was thinned, with its range where a point stands for several values.

    Args:
      name: Name in the legend.
      curve: The curve.
      **options: Whether the series is smoothed, or dotted.
    """
    low, high = (curve.low, curve.high) if curve.low != curve.high else ((), ())
    return Series(name, curve.steps, curve.values, low, high, **options)


def curves(
    series: Sequence[Series],
    title: str,
    unit: str = "",
    *,
    x: str = "step",
    may_be_logarithmic: bool = True,
) -> str:
    """Draws series over each other, with a legend; "" without a value.

    Args:
      series: The series; a series without values is left out.
      title: Name of the drawn quantity.
      unit: Unit of the values.
      x: Name of the axis of steps.
      may_be_logarithmic: Whether the axis of values is logarithmic where all are positive and span
        two powers of ten.
    """
    drawn = [one for one in series if one.values]
    if not drawn:
        return ""
    axes = _Axes.around(drawn, may_be_logarithmic)
    lines = "".join(_line(one, number, axes) for number, one in enumerate(drawn))
    scale = ", logarithmic" if axes.is_logarithmic else ""
    about = f"{unit}{scale}".removeprefix(", ")
    # The left end and the width in the drawing, and the steps there.
    places = f"{LEFT} {WIDTH - LEFT - RIGHT} {axes.first} {max(axes.last, axes.first + 1)}"
    names = [one.name for one in drawn]
    legend = "" if names == [title] else _legend(names)
    named = f"<b>{escape(title)}</b>{escape(about)}{legend}"
    return (
        f'<figure class="chart curves"><figcaption>{named}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" data-x="{places}">'
        f"<title>{escape(title)}</title>{''.join(_grid(axes, x))}{lines}"
        f'<path class="cursor"/></svg><output></output>{_data(drawn)}</figure>'
    )


def bar(parts: Mapping[str, float], unit: str = "") -> str:
    """Draws the parts of a whole side by side, with the amount and the share of each.

    Args:
      parts: A positive amount by name; amounts of 0 are left out.
      unit: Unit of the amounts.
    """
    shown = {name: x for name, x in parts.items() if x > 0}
    whole = sum(shown.values())
    spans = (
        f'<span style="--c:var(--c{n % COLORS});flex:{x / whole:.4f}"></span>'
        for n, x in enumerate(shown.values())
    )
    names = [f"{name} {number(x)} {unit} ({x / whole:.0%})" for name, x in shown.items()]
    return (
        f'<figure class="chart"><div class="parts">{"".join(spans)}</div>'
        f"<figcaption>{_legend(names)}</figcaption></figure>"
    )


class Mark(NamedTuple):
    """Something that happened in a run.

    Attributes:
      step: The step.
      text: Description, shown under the pointer.
    """

    step: float
    text: str


def lanes(marks: Mapping[str, Sequence[Mark]], last: float) -> str:
    """Draws the events of each step, in a lane for each kind; "" without a mark.

    Args:
      marks: The marks of each lane by its name.
      last: The step at the right end.
    """
    shown = {name: found for name, found in marks.items() if found}
    if not shown:
        return ""
    height = LANE * len(shown) + BOTTOM
    axes = _Axes(0, max(last, 1), 0, 1, False, left=100, width=2 * WIDTH)
    parts = [_lane(name, found, number, axes) for number, (name, found) in enumerate(shown.items())]
    steps = "".join(_steps(axes, "step", height - 6))
    return (
        f'<figure class="chart lanes"><svg viewBox="0 0 {axes.width} {height}" role="img">'
        f"<title>events</title>{steps}{''.join(parts)}</svg></figure>"
    )


def _lane(name: str, marks: Sequence[Mark], number: int, axes: "_Axes") -> str:
    y = LANE * (number + 0.5)
    places = "".join(
        f'<path class="dots" d="M{axes.x(mark.step):.1f},{y:g}h0">'
        f"<title>step {mark.step:,}: {escape(mark.text)}</title></path>"
        for mark in marks
    )
    return (
        f'<g style="--c:var(--c{number % COLORS})"><text x="0" y="{y + 4:g}">{escape(name)}</text>'
        f'<path class="grid" d="M{axes.left},{y:g}H{axes.width - RIGHT}"/>{places}</g>'
    )


def number(value: float, digits: int = 3) -> str:
    """A number for people: "0.0012", "1.5e-7", "12.3k", "4.5M"."""
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.{digits}g}{letter}"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
    return text.replace("e-0", "e-")


@dataclass(frozen=True)
class _Axes:
    """Steps and values as places of the drawing."""

    first: float
    last: float
    low: float
    high: float
    is_logarithmic: bool
    left: float = LEFT
    width: float = WIDTH

    @classmethod
    def around(cls, series: Iterable[Series], may_be_logarithmic: bool) -> "_Axes":
        """The axes that show all values and their ranges, with a margin."""
        steps = [step for one in series for step in (one.steps[0], one.steps[-1])]
        values = [[*one.values, *one.low, *one.high] for one in series]
        low, high = min(map(min, values)), max(map(max, values))
        is_logarithmic = may_be_logarithmic and low > 0 and math.log10(high / low) >= _DECADES
        if is_logarithmic:
            low, high = math.log10(low), math.log10(high)
        margin = 0.04 * (high - low) or abs(high) / 2 or 1.0
        return cls(min(steps), max(steps), low - margin, high + margin, is_logarithmic)

    def x(self, step: float) -> float:
        share = (step - self.first) / max(self.last - self.first, 1)
        return self.left + (self.width - self.left - RIGHT) * share

    def y(self, value: float) -> float:
        at = math.log10(value) if self.is_logarithmic else value
        share = (at - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    def ticks(self) -> list[float]:
        """Values to be named along the axis."""
        if not self.is_logarithmic:
            return ticks(self.low, self.high, 5)
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        found = [m * 10.0**d for d in decades for m in (1, 3)]
        inside = [x for x in found if self.low <= math.log10(x) <= self.high]
        return inside[:: len(inside) // 8 + 1]


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers at equal distances in a range, about `most` of them."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * x for x in (1, 2, 5, 10) if power * x >= 0.999 * rough)
    first = math.ceil(low / step)
    return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _grid(axes: _Axes, x: str) -> Iterator[str]:
    for value in axes.ticks():
        y = axes.y(value)
        yield f'<path class="grid" d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>'
    yield from _steps(axes, x, HEIGHT - 6)


def _steps(axes: _Axes, x: str, y: float) -> Iterator[str]:
    """The axis of steps."""
    for step in ticks(axes.first, max(axes.last, axes.first + 1), 5):
        at = axes.x(step)
        is_near = at < axes.left + 12
        anchor = "end" if at > axes.width - 40 else "start" if is_near else "middle"
        yield f'<text x="{at:.1f}" y="{y}" text-anchor="{anchor}">{number(step)}</text>'
    yield f'<text x="{axes.left - 6}" y="{y}" text-anchor="end">{escape(x)}</text>'


def _line(one: Series, number: int, axes: _Axes) -> str:
    """The band, the values, and the smoothed values of a series."""
    dashed = " dashed" if number >= COLORS else ""
    band = f'<path class="band" d="{_band(one, axes)}"/>' if one.low else ""
    is_smoothed = one.is_smoothed and len(one.values) >= _SMOOTHED_FROM
    kind = "raw" if is_smoothed else f"line{dashed}"
    parts = [band, f'<path class="{kind}" d="{_path(one.steps, one.values, axes)}"/>']
    if is_smoothed:
        smooth = smoothed(one.values, _SMOOTHED_OVER * len(one.values))
        parts.append(f'<path class="line{dashed}" d="{_path(one.steps, smooth, axes)}"/>')
    if one.is_dotted or len(one.values) == 1:
        places = zip(one.steps, one.values, strict=True)
        dots = "".join(f"M{axes.x(step):.1f},{axes.y(value):.1f}h0" for step, value in places)
        parts.append(f'<path class="dots" d="{dots}"/>')
    return f'<g style="--c:var(--c{number % COLORS})">{"".join(parts)}</g>'


def _path(steps: Sequence[float], values: Sequence[float], axes: _Axes) -> str:
    places = zip(steps, values, strict=True)
    return "M" + "L".join(f"{axes.x(step):.1f},{axes.y(value):.1f}" for step, value in places)


def _band(one: Series, axes: _Axes) -> str:
    there, back = _path(one.steps, one.high, axes), _path(one.steps[::-1], one.low[::-1], axes)
    return f"{there}L{back[1:]}z"


def smoothed(values: Sequence[float], span: float) -> list[float]:
    """Exponential moving means over about `span` values, from both sides, so that none is late."""
    there, back = _moving_mean(values, span), _moving_mean(values[::-1], span)[::-1]
    return [(a + b) / 2 for a, b in zip(there, back, strict=True)]


def _moving_mean(values: Sequence[float], span: float) -> list[float]:
    keep = 1 - 1 / max(span, 1)
    sums = itertools.accumulate(values, lambda total, value: keep * total + value)
    weights = itertools.accumulate(values, lambda total, _: keep * total + 1, initial=0.0)
    next(weights)
    return [total / weight for total, weight in zip(sums, weights, strict=True)]


def _legend(names: Sequence[str]) -> str:
    return " ".join(
        f'<span><i style="--c:var(--c{number % COLORS})"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
    )


def _data(series: Iterable[Series]) -> str:
    """The values for the script; a name cannot end the element."""
    found = [
        {"name": x.name, "steps": [*x.steps], "values": [float(f"{v:.5g}") for v in x.values]}
        for x in series
    ]
    text = json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'
