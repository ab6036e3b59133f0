"""`python -m jddp.evaluate RUN [key.path=value]...`: evaluates a finished or interrupted run again.

On the evaluation data of its config, or on others: `data.dir=elsewhere`. Prints loss and metrics.
"""

import math
import sys
from collections.abc import Sequence
from json import dumps
from typing import Any

from jddp.config.cli import Parser, add_run_arguments, enter


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    description = "Evaluate a run again: on its evaluation data, or on others (data.KEY=VALUE)."
    parser = Parser(prog="python -m jddp.evaluate", description=description)
    add_run_arguments(parser)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key.path=value", help="change a key of data or loss")
    add("--json", action="store_true", help="print one JSON object")
    return enter(lambda: _evaluate(**vars(parser.parse_intermixed_args(argv))))


def _evaluate(*, json: bool, **chosen: Any) -> None:
    from jddp.distributed.coordination import process_index
    from jddp.job.opened import open_run

    run = open_run(**chosen)
    metrics = run.evaluate()
    if process_index() == 0:
        record = {"step": run.step, "loss": metrics["loss"], **metrics}
        plain = {name: x if math.isfinite(x) else None for name, x in record.items()}
        print(dumps(plain) if json else "  ".join(f"{x} {y:.6g}" for x, y in record.items()))


if __name__ == "__main__":
    sys.exit(main())
