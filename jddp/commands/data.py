"""`jddp data`: writes token files (`tokenize`), lists the examples of a step (`rows`)."""

import argparse
import dataclasses
import json
from collections.abc import Sequence

from jddp.config.cli import Parser, add_trust
from jddp.config.permissions import expand
from jddp.distributed.command import run_command
from jddp.ground.errors import show
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
    tokenize.set_defaults(run=lambda arguments: tool("tokenize", "jddp data tokenize")(arguments))
    rows = commands.add_parser("rows", help="list the examples of a step of a run")
    add = rows.add_argument
    add("run_dir", metavar="RUN", help="a run directory, or its URL")
    add("--step", type=int, required=True, help="number of the step, from 1")
    add_trust(rows)
    add("--json", action="store_true", help="print one line of JSON instead")
    rows.set_defaults(run=_list_rows)
    arguments = parser.parse_args(argv)
    return run_command(lambda: arguments.run(arguments))


def _list_rows(arguments: argparse.Namespace) -> None:
    from jddp.trainer.runs.predictions import rows_of_step

    found = rows_of_step(arguments.run_dir, arguments.step, trust=arguments.trust)
    show(json.dumps(dataclasses.asdict(found)) if arguments.json else str(found))
