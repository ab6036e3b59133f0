"""Becomes a worker that does not outlive its launcher: python child.py LAUNCHER_PID COMMAND...

Linux kills a process with its parent only if the process itself has requested it. So a small
program requests it and becomes the worker. It imports nothing of jddp: it costs a hundredth of a
second.
"""

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, of prctl(2)


def main(launcher: str, *command: str) -> None:
    """Requests the signal and runs the command in this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):
        os._exit(1)  # the launcher ended before the request
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
