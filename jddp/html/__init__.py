"""HTML: tables and text in notebooks, and pages of one file, with charts.

    class Plan(Shown):              # has `__repr__` or `__str__`: in a notebook, its columns,
        def _tables(self):          # or these tables
            yield TextTable("a plan", [("0", "1.25")], ["bucket", "MiB"])

An export may give `<pre>` a proportional font, in which columns are lost, and notebooks stripe and
center tables, each in its own way. So elements themselves have their style, which style sheets of a
page do not override. It has no color: text is light or dark as its page.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

STYLE = "font-family: monospace; white-space: pre; line-height: 1.25"
_BOX = "overflow: auto; max-height: 36em; margin-bottom: .6em"
_CELL = "padding: .15em 1em .15em 0; vertical-align: top; background: none; max-width: 40em"
_NUMBER = re.compile(r"-?[\d,.]+(e[-+]?\d+)?( ?%)?|unknown|-|")


@dataclass(frozen=True)
class TextTable:
    """A table of text; a column of numbers is aligned at the right.

    Attributes:
      title: Text above it.
      rows: Rows of cells.
      head: Heads of the columns; () for none.
      notes: Sentences below it.
    """

    title: str
    rows: Sequence[Sequence[str]] = ()
    head: Sequence[str] = ()
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        """The table as HTML."""
        aligned = [_alignment(column) for column in zip(*self.rows, strict=True)]
        head = _row("th", self.head, aligned) if self.rows and self.head else ""
        rows = "".join(_row("td", row, aligned) for row in self.rows)
        notes = "".join(f"<div>{escape(note)}</div>" for note in self.notes)
        return (
            f'<div style="{_BOX}"><b>{escape(self.title)}</b>'
            f'<table style="border-collapse: collapse; margin: 0">{head}{rows}</table>{notes}</div>'
        )


def _alignment(column: Iterable[str]) -> str:
    return "right" if all(_NUMBER.fullmatch(cell) for cell in column) else "left"


def _row(tag: str, cells: Sequence[str], aligned: Sequence[str]) -> str:
    made = (
        f'<{tag} style="{_CELL}; text-align: {side}">{escape(cell)}</{tag}>'
        for cell, side in zip(cells, aligned, strict=True)
    )
    return f'<tr style="border-bottom: 1px solid #8884; background: none">{"".join(made)}</tr>'


class Shown:
    """Base class of objects that notebooks show as tables, or as their text if they have none."""

    def _tables(self) -> Iterable[TextTable]:
        """What the object holds."""
        return ()

    def _repr_html_(self) -> str:
        text = f'<pre style="{STYLE}">{escape(str(self))}</pre>'
        return "".join(map(str, self._tables())) or text
