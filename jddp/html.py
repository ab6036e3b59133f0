"""How a notebook shows what a terminal prints: the same text, whose columns stay columns.

    class Plan(Shown): ...        # has `__repr__` or `__str__`

A page that a notebook is exported to may give `<pre>` a proportional font, in which columns are
lost. So the font is named in the element itself, which the page's style sheets do not override.
"""

from html import escape

STYLE = "font-family: monospace; white-space: pre; line-height: 1.25"


class Shown:
    """Has HTML for a notebook, made of its text."""

    def _repr_html_(self) -> str:
        return f'<pre style="{STYLE}">{escape(str(self))}</pre>'
