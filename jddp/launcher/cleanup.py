"""Kills the processes that a launcher leaves behind: python cleanup.py, with standard input.

    +123      a process group has started
    -123      and has ended

The input ends when the launcher has ended, perhaps killed: then the remaining groups are killed. A
worker would end by itself (see `child`), but not the processes that read its data.
"""

import contextlib
import os
import signal
import subprocess
import sys


class Guard:
    """The launcher's connection to this program."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # so that Ctrl-C in a terminal does not reach it
        )

    def watch(self, group: int) -> None:
        """Adds a process group."""
        self._send(f"+{group}\n")

    def release(self, group: int) -> None:
        """Removes a process group, which has ended."""
        self._send(f"-{group}\n")

    def close(self) -> None:
        """Ends the guard."""
        self._process.communicate()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed: workers still end with the launcher
            self._process.stdin.write(line.encode())


def main() -> None:
    """Reads to the end of the input, and kills the remaining groups."""
    groups: set[int] = set()
    for line in iter(sys.stdin.readline, ""):
        (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
