"""The picture of a run's records: `run.plot()`, which needs matplotlib."""

import io
from collections.abc import Sequence
from typing import Any

from jddp.ground.errors import UsageError
from jddp.ground.typing import Record
from jddp.trainer.reports.lines import is_metric


def plot(history: Sequence[Record]) -> Any:
    """Draws a panel for the loss and one for each metric: a line for training, dots for evaluation.

    Args:
      history: Records, as in `metrics.jsonl`.

    Returns:
      A `matplotlib.figure.Figure`, which a notebook shows.

    Raises:
      UsageError: If matplotlib is not installed, or there is no record.
    """
    plotted = [record for record in history if record.get("split") in ("train", "eval")]
    found = (name for record in plotted for name in record if is_metric(name, record[name]))
    names = list(dict.fromkeys(("loss", *found)))
    if not history:
        raise UsageError("There is nothing to plot: the run has no record yet.")
    figure = _figure_class()(figsize=(4.5 * len(names), 3.2), layout="constrained")
    for name, panel in zip(names, figure.subplots(1, len(names), squeeze=False)[0], strict=True):
        for split, style in (("train", "-"), ("eval", "o--")):
            shown = [x for x in history if x.get("split") == split and x.get(name) is not None]
            if shown:
                panel.plot([x["step"] for x in shown], [x[name] for x in shown], style, label=split)
        panel.set(xlabel="step", title=name)
        panel.grid(alpha=0.3)
        panel.legend()
    return figure


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("plot needs matplotlib: pip install 'jddp[notebook]'.") from error

    class Curves(Figure):
        """A figure that a notebook shows without pyplot."""

        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png")
            return picture.getvalue()

    return Curves
