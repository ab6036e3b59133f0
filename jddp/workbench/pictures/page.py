"""The page with the pictures of a step and its tables: HTML that loads nothing.

Path("step.html").write_text(draw_page(picture))
"""

from html import escape

from jddp.workbench.pages import make_page, table
from jddp.workbench.pictures.lanes import Pictured, Table
from jddp.workbench.pictures.svg import drawing, hue
from jddp.workbench.pictures.times import compare_times

_STYLE = """
.wide svg { display: block; min-width: 900px }
body { max-width: 1200px } th { white-space: normal; vertical-align: bottom }
i.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .4em;
  background: hsl(var(--h) 60% 46%) }
i.other { background: #888 }
@media (prefers-color-scheme: dark) { @media screen {
  i.swatch { background: hsl(var(--h) 55% 62%) } i.other { background: #888 }
} }
@media (max-width: 600px) { td:first-child:not(:has(i)) { white-space: normal } }
@media print { .wide svg { min-width: 0 } }
"""


def draw_page(*steps: Pictured) -> str:
    """Returns the pictures of steps, with their times side by side, as one page of HTML."""
    times = [x.times for x in steps]
    kinds = [x.kind for x in times]
    numbers = frozenset(range(1, 1 + len(kinds)))
    tables = [Table("The step", ["", *kinds], compare_times(times), numbers)]
    tables += [each for x in steps for each in x.tables]
    body = "\n".join([*map(_drawn, steps), *map(_section, tables)])
    return make_page(f"A step, {' and '.join(kinds)}", body, style=_STYLE)


def _drawn(step: Pictured) -> str:
    drawings = (f'<div class="wide">{drawing(x)}</div>' for x in step.lanes)
    head = f'<h1>{escape(step.verdict)}</h1>\n<p class="note">{escape(step.note)}</p>'
    return "\n".join([head, *drawings])


def _section(shown: Table) -> str:
    rows = [[escape(x) for x in row] for row in shown.rows]
    for row, number in zip(rows, shown.colors, strict=False):
        kind = "swatch other" if number is None else "swatch"
        row[0] = f'<i class="{kind}"{hue(number)}></i>{row[0]}'
    note = f'<p class="note">{escape(shown.note)}</p>' if shown.note else ""
    text = table(shown.head, rows, numbers=shown.numbers)
    return f'<h2>{escape(shown.heading)}</h2>{note}<div class="wide">{text}</div>'
