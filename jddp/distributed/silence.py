"""Ends a process that has been silent for too long: python silence.py PID.

Its standard input gives repeatedly the number of seconds that may pass until the next number. Time
in which the process is stopped (SIGSTOP, Ctrl-Z) does not count, nor does time in which this
program is stopped (a paused virtual machine). On SIGQUIT the process writes its stacks; a shell's
background job may ignore SIGQUIT, so SIGKILL follows. This module imports nothing of jddp.
"""

import os
import select
import signal
import sys
from pathlib import Path

_TICK = 0.5  # seconds
_PATIENCE = 5.0  # seconds in which stacks are written


def main(process: int) -> None:
    """Runs until the process ends, or is ended."""
    left = float("inf")
    number = signal.SIGQUIT
    while _state(process) != "gone":
        if select.select([0], [], [], _TICK)[0]:
            if not (received := os.read(0, 4096)):
                return
            left = float(received.split()[-1])
        elif _state(process) not in "Tt":
            left -= _TICK
        if left < 0:
            os.kill(process, number)
            number = signal.SIGKILL  # SIGQUIT may have been ignored from the start
            left = _PATIENCE


def _state(process: int) -> str:
    """The letter that `ps` prints (T and t: stopped); "gone" if there is no process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone" if sys.platform == "linux" else "R"


if __name__ == "__main__":
    main(int(sys.argv[1]))
