"""The command line of training: `python -m jddp.train [--config FILE]... [key.path=value]...`.

What it imports takes seconds, in which a scheduler may send a signal already. So nothing is
imported here but what handles signals; the command line itself is `jddp.commands.training`.
"""

from collections.abc import Sequence

from jddp.distributed.early import leaves_at_once


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    with leaves_at_once():
        from jddp.commands.training import run

        return run(argv)
