"""Commands for a saved run: `jddp evaluate RUN`, `jddp predict RUN` and `jddp checkpoint ... RUN`.

`evaluate` evaluates on the evaluation data of its config, or on other data, `data.dir=elsewhere`,
and prints loss and metrics. `predict --data FILE --out FILE` writes the outputs of the model for
each row, in their order, as .npz or .csv; `--prompt TEXT` prints a continuation of a text.

`jddp checkpoint list | verify | export` shows its checkpoints, compares them with their digests, or
writes the values of a model into a file.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from json import dumps
from typing import Any

from jddp.checkpoint.storage import local_copy
from jddp.config.cli import Parser, add_run_arguments, share_gpus
from jddp.distributed.command import run_command
from jddp.ground.errors import FileSystemError, UsageError, printable, show
from jddp.ground.files import expand
from jddp.ground.names import tool
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
        raise UsageError("--data needs --out FILE; --prompt prints a text, without it. See --help.")
    share_gpus()  # The run may still train.
    if prompt is not None:
        from jddp.trainer.runs.opened import open_run

        show(tool("prompt")(open_run(**run, mesh=1), prompt, **chosen))
    else:
        from jddp.trainer.runs.predictions import predict_file

        show(f"predictions for {predict_file(data=data, out=out, **run):,} rows are in {out}")


def checkpoint_command(argv: Sequence[str] | None = None) -> int:
    """Runs `jddp checkpoint` and returns its exit code."""

    def run() -> None:
        arguments = _checkpoint_parser().parse_args(argv)
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Nothing here needs a GPU.
        import jax

        with jax.enable_x64(True):  # Without it arrays of 64 bits would be cast to 32.
            arguments.command(arguments)

    return run_command(run)


def _checkpoint_parser() -> Parser:
    parser = Parser(prog="jddp checkpoint")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[..., None], text: str) -> Callable[..., object]:
        added = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        added.set_defaults(command=run)
        run_dir = "a run directory, its URL, or a folder of checkpoints"
        added.add_argument("run", type=local_copy, help=run_dir)
        return added.add_argument

    command("list", _list, "list the checkpoints of a run")
    command("verify", _verify, "compare every file and every array with its digest")
    text = "write the values of a model into one file, or into a folder"
    add = command("export", _export, text)
    file = "a new file, *.safetensors; or a new folder, as on the Hugging Face Hub"
    add("file", type=expand, help=file)
    add("--step", type=int, help="step of the checkpoint (the newest that is valid)")
    names = "name the arrays as torchvision or huggingface does, for PyTorch"
    add("--names", metavar="LIBRARY", help=names)
    return parser


def _list(arguments: argparse.Namespace) -> None:
    from jddp.checkpoint import folders, reader

    for line in reader.checkpoint_lines(folders.directory_of(arguments.run)):
        print(line)


def _verify(arguments: argparse.Namespace) -> None:
    from jddp.checkpoint import folders, reader

    directory = folders.directory_of(arguments.run)
    num_damaged = 0
    for step in folders.finished(directory):
        damage = reader.find_any_damage(directory / str(step))
        num_damaged += damage is not None
        show(f"{step:>12}  {damage or 'all files and arrays are as they were saved'}")
    if num_damaged:
        raise FileSystemError(
            f"{directory}: {num_damaged} damaged checkpoints. A run renames them to *.damaged."
        )


def _export(arguments: argparse.Namespace) -> None:
    from jddp.checkpoint import folders, reader, weights

    file, names = arguments.file, arguments.names
    directory = folders.directory_of(arguments.run)

    step = reader.newest_sound(directory) if arguments.step is None else arguments.step
    folder = directory / str(step)
    if fault := reader.find_fault(folder):
        raise FileSystemError(f"{folder} cannot be read as step {step}: {fault}.")
    if not file.suffix:
        tool("export-folder", "a folder of the Hub")(folder, file, names)
    elif names:
        tool("names")(folder, file, names)
    else:
        weights.export(folder, file)
    sizes = [x.stat().st_size for x in ([file] if file.is_file() else file.iterdir())]
    show(f"step {step} is in {file}, {sum(sizes) / 2**20:.2g} MiB")
