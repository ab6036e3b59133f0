"""HTML: text in notebooks, and pages of one file, with charts.

    class Plan(Shown): ...        # has `__repr__` or `__str__`: in a notebook, its columns

A page that is exported from a notebook may give `<pre>` a proportional font, in which columns are
lost. So the element itself has the font, which the page's style sheets do not override.
"""

from html import escape

STYLE = "font-family: monospace; white-space: pre; line-height: 1.25"


class Shown:
    """Base class of objects that notebooks show as their text."""

    def _repr_html_(self) -> str:
        return f'<pre style="{STYLE}">{escape(str(self))}</pre>'
