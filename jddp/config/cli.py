"""The arguments that several commands have, and the parser of all of them."""

import argparse
import os
from typing import Any, NoReturn

from jddp.ground.errors import UsageError
from jddp.ground.names import did_you_mean


class Parser(argparse.ArgumentParser):
    """Raises an error, where argparse's parser prints its usage and exits."""

    def __init__(self, *, prog: str, **options: Any) -> None:
        """Allows no abbreviated options, and keeps the line breaks of the help texts."""
        raw = {"formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**raw | options, prog=prog, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises the error, which a command prints as one line."""
        unknown = message.partition("unrecognized arguments: ")[2].split()
        options = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        meant = did_you_mean(options[0], [*self._option_string_actions]) if options else ""
        raise UsageError(f"{message}.{meant} See {self.prog} --help.")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a config: `--config FILE`, repeatedly, and `key.path=value`."""
    add = parser.add_argument
    files = "a YAML file or the name of a preset; later ones win"
    add("overrides", nargs="*", metavar="key.path=value", help="change a key; the last one wins")
    add("--config", action="append", default=[], metavar="FILE", help=files)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a finished run: its directory, its checkpoint and the trusted code."""
    add = parser.add_argument
    add("run_dir", metavar="RUN", help="a run directory, or its URL")
    add("--checkpoint", metavar="WHICH", help="a step, best, or best/STEP (the newest step)")
    params = "parameters to use (default: the ones that the run evaluated with)"
    add("--params", choices=["params", "ema"], help=params)
    trust = "import what the run's config names: the model's class, or all of it"
    add("--trust", choices=["package", "config"], help=trust)


def share_gpus() -> None:
    """Leaves GPU memory to other programs: JAX, not started yet, would take most of it."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of devices that need not be there: their kind, topology and links."""
    add = parser.add_argument
    target = "GPUs: h100, h200 or a100; TPUs: v4, v5e, v5p or v6e"
    add("--target", metavar="DEVICE", help=target)
    add("--topology", metavar="SHAPE", help="HOSTSxGPUS (1x8), or the chips of TPUs, such as 2x4")
    link = "assume another link, such as nic=25GB/s,14us"
    add("--link", action="append", default=[], metavar="NAME=VALUE", help=link)


def check_target(arguments: argparse.Namespace, *more: str) -> None:
    """Refuses options of a target where there is none.

    Args:
      arguments: The parsed arguments.
      *more: Names of options of a target other than its topology and links.

    Raises:
      UsageError: If one is given without `--target`.
    """
    for name in ("topology", "link", *more):
        if getattr(arguments, name) and arguments.target is None:
            raise UsageError(f"--{name} needs --target, such as --target h100.")
