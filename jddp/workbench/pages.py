"""Pages of HTML in one file, which load nothing: light or dark, on paper and on a phone.

Path("step.html").write_text(make_page("A step", f"<h1>...</h1>{table(['ms'], [['12']])}"))

Tables of classes have a number for each pair, or for each class.
"""

from collections.abc import Collection, Iterator, Sequence
from html import escape
from string import Template

from jddp.workbench.charts import is_drawable, number

_PAGE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.2em auto; max-width: 1100px;
  padding: 0 1em; color: #222; background: #fff }
h1 { font-size: 1.25em; line-height: 1.3 } h2 { font-size: 1.05em; margin-top: 1.6em }
.note { color: #666 } .wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2em .7em .2em 0; text-align: left; vertical-align: top; white-space: nowrap }
td.name { white-space: normal; overflow-wrap: anywhere; min-width: 14em }
td.number, th.number { text-align: right } tr { border-bottom: 1px solid #8884 }
* { print-color-adjust: exact; -webkit-print-color-adjust: exact }
@media (prefers-color-scheme: dark) { @media screen {
  body { color: #ddd; background: #161819 } .note { color: #999 }
} }
@media print { body { font-size: 10px; max-width: none } tr { break-inside: avoid } }
$style</style></head><body>
$body
$script</body></html>
""")


def make_page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Returns a page.

    Args:
      title: Title, as text.
      body: Content of the page, as HTML.
      style: Style sheets of its own.
      script: A script that runs once it is read.
    """
    ending = f"<script>{script}</script>\n" if script else ""
    return _PAGE.substitute(title=escape(title), body=body, style=style.lstrip(), script=ending)


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Collection[int] = ()
) -> str:
    """Returns a table.

    Args:
      head: Heads of its columns, as HTML. The second column has names, which may break.
      rows: Cells, as HTML.
      numbers: Columns with numbers, which are aligned at the right.
    """

    def row(tag: str, cells: Sequence[str]) -> str:
        kinds = ["number" if i in numbers else "name" if i == 1 else "" for i in range(len(cells))]
        made = (f'<{tag} class="{kind}">{x}</{tag}>' for kind, x in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(made)}</tr>\n"

    return f"<table>\n{row('th', head)}{''.join(row('td', x) for x in rows)}</table>"


def is_matrix(value: object) -> bool:
    """Whether a value of a record has a number for each pair of classes."""
    return (
        isinstance(value, list)
        and len(value) > 1
        and all(isinstance(row, list) and len(row) == len(value) for row in value)
        and all(x is None or is_drawable(x) for row in value for x in row)
    )


def draw_matrix(name: str, rows: Sequence[Sequence[float | None]], names: Sequence[str]) -> str:
    """A row for each class, whose cells are darker the larger their share of it."""
    head = "".join(f"<th>{number}</th>" for number in range(len(rows)))
    lines = [
        f"<tr><th>{number} {escape(named)}</th>{''.join(_cells(row))}</tr>"
        for number, (named, row) in enumerate(zip(names, rows, strict=True))
    ]
    return (
        f'<div class="wide"><b>{escape(name)}</b><table class="matrix"><tr><th></th>{head}</tr>'
        f"{''.join(lines)}</table></div>"
    )


def _cells(row: Sequence[float | None]) -> Iterator[str]:
    whole = sum(abs(x) for x in row if x is not None) or 1
    for x in row:
        share = abs(x or 0) / whole
        shown = "" if not x else number(x)
        yield f'<td style="background:hsl(210 65% 50% / {0.75 * share:.2f})">{shown}</td>'


def draw_scores(name: str, values: Sequence[float | None], names: Sequence[str]) -> str:
    """A score of each class, the lowest first."""
    scores = sorted(zip(values, names, strict=True), key=lambda x: (x[0] is not None, x[0]))
    rows = [["-" if score is None else number(score), escape(named)] for score, named in scores]
    return f"<div>{table([escape(name), 'class'], rows, numbers={0})}</div>"
