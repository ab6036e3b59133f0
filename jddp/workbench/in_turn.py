"""Runs commands one after the other, in processes with the streams and the signals of this one.

    with InTurn() as turns:
        code = turns.run([sys.executable, "-m", "jddp.train"])

The processes stay in the session of this one, so the terminal sends Ctrl-C to both; a second signal
within a moment is a repeat for jddp.
"""

import subprocess
from collections.abc import Sequence

from jddp.distributed.signals import Hearing
from jddp.errors import ExitCode


class InTurn:
    """While open, in the main thread, passes the first stop signal on to the command that runs.

    After it no command is begun. A second signal, later than a moment, ends this process at once.
    """

    def __init__(self) -> None:
        self._heard: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._hearing = Hearing(self._hear)

    def __enter__(self) -> "InTurn":
        """Takes the signals."""
        self._hearing.__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        """Restores the earlier handlers."""
        self._hearing.__exit__(*reason)

    def run(self, command: Sequence[str]) -> int:
        """Runs a command to its end.

        Returns:
          Its exit code, or 128 plus the number of a signal that ended it; `ExitCode.PREEMPTED`, if
          a stop signal has come before.
        """
        if self._heard is not None:
            return ExitCode.PREEMPTED
        with subprocess.Popen(command) as self._process:
            if self._heard is not None:  # by now, while there was no process to pass it on to
                self._process.send_signal(self._heard)
            code = self._process.wait()
        return code if code >= 0 else 128 - code

    def _hear(self, number: int) -> None:
        self._heard = number
        if self._process is not None:
            self._process.send_signal(number)  # nothing is sent if it has ended
