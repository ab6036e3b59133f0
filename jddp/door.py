"""What every `python -m jddp.X` does: take arguments, and say a user's mistake in one line."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from jddp.errors import Error, UsageError


class Parser(argparse.ArgumentParser):
    """Raises a mistake, where argparse's own prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        """Raises what a door says as one line."""
        raise UsageError(f"{message}. See {self.prog} --help.")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what says a config: `--config FILE`, again and again, and `key.path=value`."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="change a key; the last one wins"
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="a YAML file or the name of a preset; later ones win",
    )


def tell(error: Error) -> None:
    """Prints a mistake on standard error."""
    for line in str(error).splitlines():
        print(f"jddp: {line}", file=sys.stderr)


def enter(run: Callable[[], int | None]) -> int:
    """Runs what is behind a door; returns its exit code."""
    try:
        return run() or 0
    except Error as error:
        tell(error)
        return error.exit_code
