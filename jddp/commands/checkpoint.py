"""`python -m jddp.checkpoint list | verify | export`: manages checkpoints."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from jddp.checkpoint.storage import local_copy
from jddp.config.cli import Parser, run_command
from jddp.config.permissions import expand
from jddp.errors import FileSystemError, show

EXPORTED = ["params", "ema_params", "model_state"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""

    def run() -> None:
        arguments = _parser().parse_args(argv)
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Nothing here needs a GPU.
        import jax

        with jax.enable_x64(True):  # Else arrays of 64 bits would be cast to 32.
            arguments.command(arguments)

    return run_command(run)


def _parser() -> Parser:
    parser = Parser(prog="python -m jddp.checkpoint")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (run, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        command.set_defaults(command=run)
        add = command.add_argument
        add("run", type=local_copy, help="a run directory, its URL, or a folder of checkpoints")
        if name == "export":
            add("file", type=expand, help="a new file: *.safetensors or *.msgpack")
            add("--step", type=int, help="step of the checkpoint (the newest that is valid)")
            add("--all", action="store_true", help="the whole state, not only the model's values")
    return parser


def _list(arguments: argparse.Namespace) -> None:
    from jddp.checkpoint import folders, listing

    for line in listing.lines(folders.directory_of(arguments.run)):
        print(line)


def _verify(arguments: argparse.Namespace) -> None:
    from jddp.checkpoint import folders, listing

    directory = folders.directory_of(arguments.run)
    num_damaged = 0
    for step in folders.finished(directory):
        damage = listing.find_any_damage(directory / str(step))
        if (directory / str(step)).exists():  # a run may have removed it meanwhile
            num_damaged += damage is not None
            show(f"{step:>12}  {damage or 'all files and arrays are as they were saved'}")
    if num_damaged:
        raise FileSystemError(
            f"{directory}: {num_damaged} damaged checkpoints. A run renames them to *.damaged."
        )


def _export(arguments: argparse.Namespace) -> None:
    from jddp.checkpoint import export, folders, reader

    directory = folders.directory_of(arguments.run)

    def find() -> Path:
        step = reader.newest_sound(directory) if arguments.step is None else arguments.step
        if fault := reader.find_fault(directory / str(step)):
            raise FileSystemError(
                f"{directory / str(step)} cannot be read as step {step}: {fault}."
            )
        return directory / str(step)

    def write(folder: Path) -> str:
        export.export(folder, arguments.file, None if arguments.all else EXPORTED)
        return folder.name

    step = reader.read_standing(find, write)
    show(f"step {step} is in {arguments.file}, {arguments.file.stat().st_size / 2**20:.2g} MiB")


COMMANDS = {
    "list": (_list, "list the checkpoints of a run"),
    "verify": (_verify, "compare every file and every array with its digest"),
    "export": (_export, "write the values of a model into one file"),
}
