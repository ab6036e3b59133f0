"""Tables of classes: a matrix with a number for each pair of them, and a score for each."""

from collections.abc import Iterator, Sequence
from html import escape

from jddp.workbench.charts import number
from jddp.workbench.pages import table
from jddp.workbench.thinned import is_drawable


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
    order = sorted(range(len(values)), key=lambda i: (values[i] is not None, values[i]))
    rows = [[_score(values[i]), escape(names[i])] for i in order]
    return f"<div>{table([escape(name), 'class'], rows, numbers={0})}</div>"


def _score(value: float | None) -> str:
    return "-" if value is None else number(value)
