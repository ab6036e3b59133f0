"""`jddp init DIRECTORY`: starts a project, with a config, a model, a loss and data.

They train as they are; replace them by yours.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from jddp.config.cli import Parser
from jddp.config.permissions import expand
from jddp.distributed.command import run_command
from jddp.ground.errors import UsageError, file_errors, show

# A wheel carries the files inside the package, a checkout has them in examples/project.
_ROOT = Path(__file__).parents[2]
FOLDERS = (_ROOT / "jddp" / "project", _ROOT / "examples" / "project")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    description = "Write a config, a model, a loss and data, which train as they are."
    parser = Parser(prog="jddp init", description=description)
    parser.add_argument("directory", type=expand, help="a new folder")
    return run_command(lambda: _start(**vars(parser.parse_args(argv))))


def _start(directory: Path) -> None:
    files = sorted(next(folder for folder in FOLDERS if folder.is_dir()).glob("*.*"))
    with file_errors(f"{directory} cannot be written"):
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError(f"{directory} is not empty. Name a new folder.")
        for file in files:
            shutil.copyfile(file, directory / file.name)
    show(f"{directory} holds {', '.join(file.name for file in files)}")
    show(f"Start with: cd {directory} && jddp train --config config.yaml")
