"""`jddp evaluate RUN [key.path=value]...` and `jddp predict RUN ...`: commands for a saved run.

`evaluate` evaluates on the evaluation data of its config, or on other data, `data.dir=elsewhere`,
and prints loss and metrics. `predict --data FILE --out FILE` writes the outputs of the model for
each row, in their order, as .npz or .csv; `--prompt TEXT` prints a continuation of a text.
"""

import sys
from collections.abc import Sequence
from json import dumps
from typing import Any

from jddp.config.cli import Parser, add_run_arguments, share_gpus
from jddp.config.permissions import expand
from jddp.distributed.command import run_command
from jddp.ground.errors import UsageError, printable, show
from jddp.ground.names.plugins import tool
from jddp.ground.typing import Record
from jddp.trainer.reports.files import as_json
from jddp.trainer.reports.lines import columns_of, tables_in


def evaluate_command(argv: Sequence[str] | None = None) -> int:
    """Runs `jddp evaluate` and returns its exit code."""
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


def predict_command(argv: Sequence[str] | None = None) -> int:
    """Runs `jddp predict` and returns its exit code."""
    description = "Write the outputs of a run's model for each row, or continue a text with it."
    parser = Parser(prog="jddp predict", description=description)
    add_run_arguments(parser)
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    data = "a .npz file with image, tokens or x; a .npy file; a folder of images"
    add("--data", type=expand, metavar="FILE", help=data)
    add("--prompt", metavar="TEXT", help="a text that a language model continues")
    add = parser.add_argument
    add("--out", type=expand, metavar="FILE", help="output file: *.npz or *.csv")
    add("--num-tokens", type=int, default=100, metavar="N", help="tokens to add to a text (100)")
    add("--temperature", type=float, default=1.0, help="0 takes the likeliest token (1.0)")
    add("--seed", type=int, default=0, help="seed for choosing tokens (0)")
    tokenizer = "Hugging Face tokenizer file; not needed for bytes"
    add("--tokenizer", type=expand, metavar="FILE", help=tokenizer)
    return run_command(lambda: _predict(**vars(parser.parse_args(argv))))


def _predict(*, data: Any, out: Any, prompt: str | None, **chosen: Any) -> None:
    run = {name: chosen.pop(name) for name in ("run_dir", "checkpoint", "params", "trust")}
    if (data is None) != (out is None):
        raise UsageError(
            "--data needs --out FILE; --prompt prints a text, without --out. See --help."
        )
    share_gpus()  # The run may still train.
    if prompt is not None:
        from jddp.trainer.runs.opened import open_run

        show(tool("prompt")(open_run(**run, mesh=1), prompt, **chosen))
    else:
        from jddp.trainer.runs.predictions import predict_file

        show(f"predictions for {predict_file(data=data, out=out, **run):,} rows are in {out}")
