"""A comparison of runs as a page of HTML: the verdict, a table, and their curves over each other.

runs = read_runs(find_runs([Path("runs")]))
text = comparison_page(compare_runs(runs), runs)
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from jddp.typing import Record
from jddp.workbench.charts import SCRIPT, STYLE, curves, series_of
from jddp.workbench.comparison import ComparedRuns, Seeds, cell, differing, with_error
from jddp.workbench.pages import make_page, table
from jddp.workbench.results import RecordedRun, RunResult
from jddp.workbench.thinned import Thinned

GRID = """
.charts { display: grid; gap: 1.5em;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)) }
"""
MOST_CURVES = 8  # over each other, each with a color of its own


def comparison_page(compared: ComparedRuns, runs: Sequence[RecordedRun]) -> str:
    """Returns a page, which loads nothing.

    Args:
      compared: The comparison.
      runs: The runs that were compared.
    """
    of_path = {run.path: run for run in runs}
    drawn = [of_path[x.path] for x in compared.results][:MOST_CURVES]
    note = ""
    if len(drawn) < len(runs):
        note = f'<p class="note">Curves of the best {len(drawn)} of {len(runs):,} runs.</p>'
    body = [
        f"<h1>{escape(compared.verdict)}</h1>",
        f'<div class="wide">{_table(compared)}</div>',
        "<h2>Curves</h2>",
        note,
        f'<div class="charts">{"".join(_charts(compared.metric, drawn))}</div>',
    ]
    return make_page("Comparison of runs", "\n".join(body), style=STYLE + GRID, script=SCRIPT)


def _table(compared: ComparedRuns) -> str:
    keys = ["seed", *differing(compared.results)]
    head = [compared.metric, "run", "step", "last", "seconds a step", *keys]
    rows = [row for group in compared.groups for row in _rows(group, keys)]
    return table([*map(escape, head)], rows, numbers=(0, 2, 3, 4))


def _rows(group: Seeds, keys: Sequence[str]) -> Iterator[list[str]]:
    for x in group.results:
        yield [*map(escape, [*_numbers(x), *(str(x.settings.get(key, "")) for key in keys)])]
    if group.variance is not None:
        mean = with_error(group.mean, group.variance)
        yield [f"<b>{mean}</b>", f"mean of {len(group.values)} seeds", *[""] * (3 + len(keys))]


def _numbers(result: RunResult) -> list[str]:
    step = "-" if result.step is None else f"{result.step:,}"
    last, seconds = cell(result.last), cell(result.step_seconds, digits=3)
    return [cell(result.best), result.name, step, last, seconds]


def _charts(metric: str, runs: Sequence[RecordedRun]) -> Iterator[str]:
    """A chart for the metric, for each other one of the evaluations, and for the training loss."""
    others = set[str]().union(*(run.metrics for run in runs)) - {metric}
    for name in [metric, *sorted(others)]:
        evaluations = [(run.name, _curve(run.evaluations, name)) for run in runs]
        yield curves([series_of(*x, is_dotted=True) for x in evaluations], name, "evaluations")
    training = [
        (run.name, _curve((x for x in run.records if x.get("split") == "train"), "loss"))
        for run in runs
    ]
    yield curves([series_of(*x, is_smoothed=True) for x in training], "loss", "training")


def _curve(records: Iterable[Record], metric: str) -> Thinned:
    curve = Thinned()
    for record in records:
        if metric in record:
            curve.add(record["step"], record[metric])
    curve.finish()
    return curve
