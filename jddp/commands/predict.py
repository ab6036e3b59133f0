"""`jddp predict RUN ...`: predictions of a run for rows, images, or a text.

`--data FILE --out FILE` writes the outputs of the model for each row, in their order, as .npz or
.csv; `--prompt TEXT` prints a continuation of a text.
"""

from collections.abc import Sequence
from typing import Any

from jddp.config.cli import Parser, add_run_arguments, share_gpus
from jddp.config.permissions import expand
from jddp.distributed.command import run_command
from jddp.ground.errors import UsageError, show
from jddp.ground.names.plugins import tool


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    description = "Write the outputs of a run's model for each row, or continue a text with it."
    parser = Parser(prog="jddp predict", description=description)
    add_run_arguments(parser)
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    data = "a .npz file with image, tokens or x; a .npy, .csv or .parquet file; a folder of images"
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
