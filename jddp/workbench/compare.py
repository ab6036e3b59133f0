"""`python -m jddp.compare RUN...`: which run is better, by how much, and what differs?

A RUN is a run directory, or a folder of them. Their records and configs are read, and nothing runs.
"""

from collections.abc import Sequence
from json import dumps
from pathlib import Path

from jddp.config.cli import Parser, run_command
from jddp.config.permissions import expand
from jddp.errors import file_errors, show
from jddp.names import MODES


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    description = "Compare runs by their best evaluations. Seeds of one config are one group."
    parser = Parser(prog="python -m jddp.compare", description=description)
    add = parser.add_argument
    add("runs", type=expand, nargs="+", metavar="RUN", help="run directory, or folder of runs")
    add("--metric", help="metric of the evaluations; by default checkpoint.best_metric")
    add("--mode", choices=MODES, default="auto", help="what is better; auto: by the name")
    add("--json", action="store_true", help="print one line of JSON instead")
    add("--html", type=expand, metavar="FILE", help="write a page with curves, too")
    return run_command(lambda: _compare(**vars(parser.parse_args(argv))))


def _compare(
    *, runs: list[Path], metric: str | None, mode: str, json: bool, html: Path | None
) -> None:
    from jddp.workbench.comparison import compare_runs
    from jddp.workbench.comparison_page import comparison_page
    from jddp.workbench.results import find_runs, read_runs

    recorded = read_runs(find_runs(runs))
    found = compare_runs(recorded, metric, mode)
    if html is not None:
        with file_errors(f"--html {html} cannot be written"):
            html.write_text(comparison_page(found, recorded), encoding="utf-8")
    show(dumps(found.as_json()) if json else str(found))
