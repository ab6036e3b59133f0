"""The progress of a run in a notebook: one element with a bar, the newest lines and the curves.

It is replaced about once a second, and at the end. What it shows then is static HTML, which the
notebook keeps, also where it is saved, run without a browser, or exported. A front end without HTML
shows the newest line. Sentences are printed below it.
"""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from html import escape

from jddp.errors import printable_lines
from jddp.html.charts import STYLE, Series, curves, series_of
from jddp.html.thinned import Thinned
from jddp.trainer.reports.lines import Course, is_metric, metrics_of, train_line
from jddp.trainer.reports.log_file import said
from jddp.trainer.reports.progress import Progress
from jddp.typing import Record

SECONDS_BETWEEN_UPDATES = 1.0
MOST_CHARTS = 2  # the loss, and the first metric
COLUMNS = 120
log = logging.getLogger("jddp")

Show = Callable[[str, str], None]  # shows HTML, or else text, in the place of what it has shown

# JupyterLab and nbconvert have a theme of their own, whatever that of the system is.
_DARK = "[data-jp-theme-light=false] .chart { --c0: #6aaaf0; --c1: #f2a154 }"
_BAR = "height: .6em; border-radius: .3em; overflow: hidden; margin: .3em 0; background: #8884"
_LINE = "white-space: pre-wrap; font-variant-numeric: tabular-nums"
_CHARTS = "display: flex; flex-wrap: wrap; gap: .5em 1.5em; margin-top: .6em"


def make_progress(course: Course, *, is_writer: bool) -> "Progress | NotebookProgress":
    """Returns the sink that shows progress here: in an element of a notebook, or as text.

    Args:
      course: Facts of the run that its records do not have.
      is_writer: Whether this process shows anything.
    """
    if is_writer and _is_in_notebook():
        return NotebookProgress(course, _element())
    return Progress(course, is_writer=is_writer)


def _is_in_notebook() -> bool:
    """Whether a kernel runs this process, such as that of Jupyter, VS Code or Colab."""
    ipython = sys.modules.get("IPython")  # A kernel has imported it.
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


def _element() -> Show:
    """A new output of the running cell."""
    from IPython.display import DisplayHandle  # Only a notebook has it.

    handle = DisplayHandle()
    is_there = False

    def show(html: str, text: str) -> None:
        nonlocal is_there
        send = handle.update if is_there else handle.display
        send({"text/html": html, "text/plain": text}, raw=True)
        is_there = True

    return show


class NotebookProgress:
    """A sink that shows records in one element; a failure of the front end is logged, once.

    Args:
      course: Facts of the run that its records do not have.
      show: Function that shows HTML, or else text, in the place of what it has shown.

    Attributes:
      course: Facts of the run.
    """

    def __init__(self, course: Course, show: Show) -> None:
        self.course = course
        self._show: Show | None = show
        self._step = 0
        self._lines = {"train": "compiling"}
        self._curves = {"loss": _empty()}  # by metric, the loss first
        self._shown_at = -math.inf
        self._update()

    def log(self, record: Record) -> None:
        """Shows a record of training or of an evaluation, if it is time."""
        split = record["split"]
        self._step = max(self._step, record["step"])
        self._lines[split] = line = self._line(record)
        said.info(line)
        for name in filter(lambda name: is_metric(name, record[name]), record):
            both = self._curves.setdefault(name, _empty())
            both[split].add(record["step"], record[name])
        if time.monotonic() >= self._shown_at + SECONDS_BETWEEN_UPDATES:
            self._update()

    def note(self, text: str) -> None:
        """Prints a sentence."""
        said.info(text)
        # A run continues without its notebook.
        with contextlib.suppress(OSError, ValueError):
            print(printable_lines(text), flush=True)

    def close(self) -> None:
        """Shows the end; called also when training fails."""
        self._update()
        self._show = None

    def _line(self, record: Record) -> str:
        if record["split"] == "train":
            return train_line(record, self.course, COLUMNS)
        return "  ".join([f"eval {record['step']}", *metrics_of(record)])

    def _update(self) -> None:
        if self._show is None:
            return
        self._shown_at = time.monotonic()
        try:
            self._show("".join(self._parts()), self._lines["train"])
        except Exception as error:  # The front end is gone, or cannot show it.
            self._show = None
            log.warning("The notebook cannot show progress: %r", error)

    def _parts(self) -> Iterator[str]:
        share = min(1.0, self._step / max(self.course.num_steps, 1))
        yield f"<style>{STYLE}{_DARK}</style>"
        yield (
            f'<div role="progressbar" aria-valuenow="{share:.0%}" style="{_BAR}">'
            f'<div style="width: {share:.1%}; height: 100%; background: #3b82c4"></div></div>'
        )
        for line in filter(None, [*self._lines.values(), self.course.best]):
            yield f'<div style="{_LINE}">{escape(line)}</div>'
        charts = [_chart(name, both) for name, both in [*self._curves.items()][:MOST_CHARTS]]
        yield f'<div style="{_CHARTS}">{"".join(charts)}</div>'


def _empty() -> dict[str, Thinned]:
    return {"train": Thinned(), "eval": Thinned()}


def _chart(name: str, both: dict[str, Thinned]) -> str:
    series: list[Series] = [
        series_of("train", both["train"], is_smoothed=True),
        series_of("eval", both["eval"], is_dotted=True),
    ]
    drawn = curves(series, name)
    return drawn and f'<div style="flex: 1 1 20em; max-width: 34em">{drawn}</div>'
