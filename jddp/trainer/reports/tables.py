"""Tables of metrics that are arrays, such as a confusion matrix or the recall of each class.

    recall     0    1     2
             0.9  0.8  0.95

    confusion   0   1   2
            0  90   3   7
            1   4  88   8
            2   0   1  99

Rows and columns are numbered. An array of other dims, or one too large for a terminal, is described
by its shape; records hold the whole array, as nested lists.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jddp.errors import printable
from jddp.typing import Record

MOST_LINES = 40
Cells = Sequence[Sequence[str]]


def tables_in(record: Record, columns: int) -> Iterator[str]:
    """Yields the lines of a table for each metric of a record that is an array.

    Args:
      record: A record of an evaluation.
      columns: Width of the terminal.
    """
    for name, value in record.items():
        if isinstance(value, list):
            yield from table_of(printable(name), value, columns)


def table_of(name: str, values: Sequence[Any], columns: int) -> list[str]:
    """Returns the lines of one table.

    Args:
      name: Name of the metric.
      values: Numbers, or lists of equally many numbers; None for a number that is not finite.
      columns: Width of the terminal.
    """
    shape = shape_of(values)
    lines = list[str]()
    if len(shape) == 1:
        lines = _list(name, [as_text(x) for x in values], columns)
    elif len(shape) == 2 and shape[1]:
        heads = [name, *map(str, range(shape[1]))]
        rows = [[str(i), *map(as_text, row)] for i, row in enumerate(values)]
        lines = _aligned([heads, *rows])
    if not lines or len(lines) > MOST_LINES or len(lines[0]) > columns:
        return [f"{name}  array of {' x '.join(map(str, shape))}"]
    return lines


def shape_of(values: object) -> list[int]:
    """The dims of a number, or of nested lists of equal lengths."""
    if not isinstance(values, list):
        return []
    return [len(values), *(shape_of(values[0]) if values else [])]


def as_text(value: float | None, digits: int = 4) -> str:
    """A number of a record in some digits; "nan" for None, as JSON has no NaN and no infinity."""
    return "nan" if value is None else f"{value:.{digits}g}"


def _list(name: str, numbers: Sequence[str], columns: int) -> list[str]:
    """Lines of numbers below their indices, with as many in a line as there is room for."""
    heads = [str(i) for i in range(len(numbers))]
    width = max(map(len, [*numbers, *heads]), default=1)
    num = max(1, (columns - len(name)) // (width + 2))
    lines = list[str]()
    for first in range(0, len(numbers), num):
        places = range(len(numbers))[first : first + num]
        lines += _aligned(
            [
                ["" if lines else name, *(heads[i].rjust(width) for i in places)],
                [" " * len(name), *(numbers[i] for i in places)],
            ]
        )
    return lines


def _aligned(rows: Cells) -> list[str]:
    """Lines of cells, in columns that are aligned at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
