"""`jddp evaluate RUN [key.path=value]...`: evaluates a finished or interrupted run again.

It evaluates on the evaluation data of its config, or on other data: `data.dir=elsewhere`. It prints
loss and metrics.
"""

import sys
from collections.abc import Sequence
from json import dumps
from typing import Any

from jddp.config.cli import Parser, add_run_arguments, share_gpus
from jddp.distributed.command import run_command
from jddp.ground.errors import printable, show
from jddp.ground.typing import Record
from jddp.trainer.reports.files import as_json
from jddp.trainer.reports.lines import columns_of, tables_in


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    description = "Evaluate a run again, on its evaluation data or on other data (data.KEY=VALUE)."
    parser = Parser(prog="jddp evaluate", description=description)
    add_run_arguments(parser)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key.path=value", help="change a key of data or loss")
    add("--json", action="store_true", help="print one JSON object")
    return run_command(lambda: _evaluate(**vars(parser.parse_intermixed_args(argv))))


def _evaluate(*, json: bool, **chosen: Any) -> None:
    from jddp.distributed.coordination import process_index
    from jddp.trainer.runs.opened import open_run

    share_gpus()  # The run may still train.
    run = open_run(**chosen)
    metrics = run.evaluate()
    if process_index() == 0:
        record = {"step": run.step, "loss": metrics["loss"], **metrics}
        show(dumps(as_json(record)) if json else _as_text(record))


def _as_text(record: Record) -> str:
    """Numbers in one line, and a table for each array."""
    numbers = {name: x for name, x in record.items() if not isinstance(x, list)}
    line = "  ".join(f"{printable(name)} {x:.6g}" for name, x in numbers.items())
    return "\n".join([line, *tables_in(record, columns_of(sys.stdout))])
