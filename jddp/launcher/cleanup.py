"""Kills the processes that a launcher leaves behind: python cleanup.py, with standard input.

    123 456      the process groups that run now

The input ends when the launcher ends, even if it was killed. Then the groups of the last line are
killed: the workers, and the processes that read their data.
"""

import contextlib
import os
import signal
import sys


def kill(group: int) -> None:
    """Kills the processes of a group, if there are any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    """Reads to the end of the input, and kills the groups of the last line."""
    for group in ["", *sys.stdin][-1].split():
        kill(int(group))


if __name__ == "__main__":
    main()
