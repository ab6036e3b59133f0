"""`python -m jddp.data tokenize` writes token files."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jddp.config.cli import Parser, run_command
from jddp.config.permissions import expand
from jddp.errors import show


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    return run_command(lambda: _tokenize(_parser().parse_args(argv)))


def _parser() -> Parser:
    parser = Parser(prog="python -m jddp.data")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    tokenize = commands.add_parser("tokenize", help="write token files from text")
    add = tokenize.add_argument
    add("directory", type=expand, help="output directory; must hold no token files yet")
    add("texts", type=expand, nargs="+", help="files or folders; a document per line of a .jsonl")
    add("--tokenizer", default="bytes", help="bytes, or a Hugging Face tokenizer file")
    add("--end-of-document", metavar="TOKEN", help="token after each document; zero for bytes")
    add("--test-share", type=float, default=0.1, help="fraction of documents for testing (0.1)")
    add("--shard-tokens", type=int, default=2**27, help="tokens per file (2^27)")
    return parser


def _tokenize(arguments: argparse.Namespace) -> None:
    from jddp.data.sources.tokenize import BYTES, documents_in, tokenizer_in, write_tokens

    chosen = arguments.tokenizer
    end = arguments.end_of_document
    index = write_tokens(
        documents_in(arguments.texts),
        arguments.directory,
        tokenizer=BYTES if chosen == "bytes" else tokenizer_in(Path(chosen), end_of_document=end),
        test_share=arguments.test_share,
        shard_tokens=arguments.shard_tokens,
    )
    for part, num_tokens in index["tokens"].items():
        show(f"{part:5}  {index['documents'][part]:,} documents, {num_tokens:,} tokens")
    show(
        f"train with data.name=tokens data.dir={arguments.directory} "
        f"data.kwargs.sequence_length=... , and a model of vocab_size {index['vocab_size']:,}"
    )
