"""`jddp checkpoint list | verify | export`: manages checkpoints."""

import argparse
import os
from collections.abc import Callable, Sequence

from jddp.checkpoint.storage import local_copy
from jddp.config.cli import Parser
from jddp.config.permissions import expand
from jddp.distributed.command import run_command
from jddp.ground.errors import FileSystemError, show
from jddp.ground.names.plugins import tool


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""

    def run() -> None:
        arguments = _commands().parse_args(argv)
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Nothing here needs a GPU.
        import jax

        with jax.enable_x64(True):  # Without it arrays of 64 bits would be cast to 32.
            arguments.command(arguments)

    return run_command(run)


def _commands() -> Parser:
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
    from jddp.checkpoint import folders, reader
    from jddp.checkpoint.weights import export

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
        export(folder, file)
    sizes = [x.stat().st_size for x in ([file] if file.is_file() else file.iterdir())]
    show(f"step {step} is in {file}, {sum(sizes) / 2**20:.2g} MiB")
