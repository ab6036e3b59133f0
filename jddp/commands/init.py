"""`python -m jddp.init DIRECTORY`: starts a project, with a config, a model, a loss and data.

They train as they are; replace them by yours.
"""

from collections.abc import Sequence
from pathlib import Path

from jddp.config.cli import Parser, run_command
from jddp.config.permissions import expand
from jddp.errors import show


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    description = "Write a config, a model, a loss and data, which train as they are."
    parser = Parser(prog="python -m jddp.init", description=description)
    parser.add_argument("directory", type=expand, help="a new folder")
    return run_command(lambda: _start(**vars(parser.parse_args(argv))))


def _start(directory: Path) -> None:
    from jddp.commands.project import start_project

    show(f"{directory} holds {', '.join(start_project(directory))}")
    show(f"Start with: cd {directory} && jddp train --config config.yaml")
