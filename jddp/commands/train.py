"""The command line of training: `python -m jddp.train [--config FILE]... [key.path=value]...`.

Its imports take seconds, in which a scheduler may already send a signal. So this module imports
only the handling of signals; the command line itself is `jddp.commands.training`.
"""

from collections.abc import Sequence

from jddp.distributed.signals import leaves_at_once


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    with leaves_at_once():
        from jddp.commands.training import run

        return run(argv)
