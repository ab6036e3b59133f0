"""`jddp data tokenize`: writes token files."""

from collections.abc import Sequence

from jddp.config.cli import Parser
from jddp.config.permissions import expand
from jddp.distributed.command import run_command
from jddp.ground.names.plugins import tool


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
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
