"""Kills the processes that a launcher leaves behind: python cleanup.py, with standard input.

    123 456      the process groups that run now

The input ends when the launcher has ended, perhaps killed: then those of the last line are killed,
which are the workers, and the processes that read their data.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import Any


class Guard:
    """The launcher's connection to this program."""

    def __init__(self) -> None:
        command, nowhere = [sys.executable, "-I", "-S", __file__], subprocess.DEVNULL
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": nowhere, "stderr": nowhere}
        # Its own session, so that Ctrl-C in a terminal does not reach it.
        self._process = subprocess.Popen(command, bufsize=0, start_new_session=True, **pipes)

    def watch(self, groups: Iterable[int]) -> None:
        """Replaces the process groups."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed
            self._process.stdin.write(f"{' '.join(map(str, groups))}\n".encode())

    def close(self) -> None:
        """Ends the guard."""
        self._process.communicate()


def kill(group: int) -> None:
    """Kills the processes of a group, if there are any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    """Reads to the end of the input, and kills the groups of the last line."""
    lines = ["", *sys.stdin]
    for group in map(int, lines[-1].split()):
        kill(group)


if __name__ == "__main__":
    main()
