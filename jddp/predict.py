"""`python -m jddp.predict RUN --data FILE --out FILE`: predictions of a run for the rows of a file.

The outputs of the model for each row, in their order, as .npz, .csv or .jsonl.
"""

import sys
from collections.abc import Sequence
from typing import Any

from jddp.config.cli import Parser, add_run_arguments, enter
from jddp.config.permissions import expand


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    description = "Write the outputs of a run's model for each row of a file."
    parser = Parser(prog="python -m jddp.predict", description=description)
    add_run_arguments(parser)
    add, data = parser.add_argument, "a .npz file with image, tokens or x, or a .npy file of one"
    add("--data", type=expand, required=True, metavar="FILE", help=data)
    add("--out", type=expand, required=True, metavar="FILE", help="to write: *.npz, *.csv, *.jsonl")
    return enter(lambda: _predict(**vars(parser.parse_args(argv))))


def _predict(**chosen: Any) -> None:
    from jddp.job.predictions import predict_file

    print(f"{predict_file(**chosen):,} rows are predicted in {chosen['out']}")


if __name__ == "__main__":
    sys.exit(main())
