"""Kills what a launcher leaves behind: python guard.py, told on its standard input.

    +123      a process group has been started
    -123      and has been ended

When the input ends, the launcher has gone, killed perhaps: whatever it has not taken back is
killed. A worker would then die by itself (see `child`), but not the processes that read its data.
"""

import contextlib
import os
import signal
import subprocess
import sys


class Guard:
    """The launcher's end of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C in a terminal does not reach it
        )

    def watch(self, group: int) -> None:
        """Takes charge of a process group."""
        self._tell(f"+{group}\n")

    def release(self, group: int) -> None:
        """Takes no more: it has ended."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Ends the guard."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody has killed it: workers still die with us
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def main() -> None:
    """Listens to the end, and kills."""
    groups: set[int] = set()
    for line in iter(sys.stdin.readline, ""):
        (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
