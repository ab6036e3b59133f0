"""`jddp init DIRECTORY` and `jddp data tokenize`: what comes before training.

`init` starts a project with a config, a model, a loss and data, which train as they are: replace
them by yours. `data tokenize` writes token files.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from jddp.config.cli import Parser
from jddp.distributed.command import run_command
from jddp.ground.errors import UsageError, file_errors, show
from jddp.ground.files import expand
from jddp.ground.names import tool

# A wheel carries the files inside the package, a checkout has them in examples/project.
_ROOT = Path(__file__).parents[2]
FOLDERS = (_ROOT / "jddp" / "project", _ROOT / "examples" / "project")


def init_command(argv: Sequence[str] | None = None) -> int:
    """Runs `jddp init` and returns its exit code."""
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


def data_command(argv: Sequence[str] | None = None) -> int:
    """Runs `jddp data` and returns its exit code."""
    parser = Parser(prog="jddp data")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    tokenize = commands.add_parser("tokenize", help="write token files from text")
    add = tokenize.add_argument
    add("directory", type=expand, help="output directory; must hold no token files yet")
    add("texts", type=expand, nargs="+", help="files or folders; a document per line of a .jsonl")
    add("--tokenizer", default="bytes", help="bytes, or a Hugging Face tokenizer file")
    add("--end-of-document", metavar="TOKEN", help="token after each document; zero for bytes")
    add("--test-share", type=float, default=0.1, help="fraction of documents for testing (0.1)")
    add("--shard-tokens", type=int, default=2**27, help="tokens per file (2^27)")
    arguments = parser.parse_args(argv)
    return run_command(lambda: tool("tokenize", "jddp data tokenize")(arguments))
