"""Arguments of commands that model a step for GPUs that need not be there."""

import argparse

from jddp.errors import UsageError


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of GPUs that need not be there: their kind, topology and links."""
    add = parser.add_argument
    add("--target", metavar="GPU", help="model the step on these GPUs: h100, h200 or a100")
    add("--topology", metavar="HOSTSxGPUS", help="of the target (default: 1x8)")
    link = "assume another link of the target: nvlink=300GB/s,2us, nic=25GB/s,14us"
    add("--link", action="append", default=[], metavar="NAME=BANDWIDTH,LATENCY", help=link)


def check_target(arguments: argparse.Namespace, *more: str) -> None:
    """Refuses options of a target where there is none.

    Args:
      arguments: The parsed arguments.
      *more: Names of options of a target beside its topology and links.

    Raises:
      UsageError: If one is given without `--target`.
    """
    for name in ("topology", "link", *more):
        if getattr(arguments, name) and arguments.target is None:
            raise UsageError(f"--{name} needs --target, such as --target h100.")
