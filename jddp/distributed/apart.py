"""Programs that watch this process from outside, and survive if it is killed.

    with started_apart("silence", str(os.getpid())) as stdin:     # python apart.py silence PID
        ...

The standard input of a program ends with the process that has started it, even if that process was
killed. As a program, this file imports only the standard library.

- `silence` ends a process that has been silent for too long. Its input repeatedly gives the number
  of seconds that may pass until the next number. Time in which the process is stopped (SIGSTOP,
  Ctrl-Z) does not count, nor does time in which the program is stopped (a paused virtual machine).
  On SIGQUIT the process writes its stacks; a shell's background job may ignore SIGQUIT, so SIGKILL
  follows.
- `cleanup` kills the process groups in the last line of its input, when the input ends: the
  processes of a launcher, and the processes that read their data.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

END_SECONDS = 5.0  # Limit for a program to end after its input.
_TICK = 0.5  # Seconds.
_PATIENCE = 5.0  # Seconds to write stacks.


@contextlib.contextmanager
def started_apart(program: str, *arguments: str) -> Iterator[IO[bytes]]:
    """Runs a program while open; it shares no stream and no Ctrl-C with this process.

    Args:
      program: Name of the program.
      *arguments: Arguments of the program.

    Yields:
      The standard input of the program, without a buffer; it ends with this process.
    """
    from jddp.distributed.signals import in_forked_children

    command = [sys.executable, "-I", "-S", __file__, program, *arguments]
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(
        command,
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=nowhere,
        stderr=nowhere,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        # A child that kept the input open would keep the program from ending.
        try:
            with in_forked_children(process.stdin.close):
                yield process.stdin
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a program by the end of its input; kills it if it does not react, as after SIGSTOP."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # The program was killed.
        process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def kill_group(group: int) -> None:
    """Kills the processes of a group, if there are any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def clean_up() -> None:
    """Reads to the end of the input, and kills the groups of the last line."""
    for group in ["", *sys.stdin][-1].split():
        kill_group(int(group))


def watch_silence(process: int) -> None:
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
            number = signal.SIGKILL  # SIGQUIT may have been ignored from the start.
            left = _PATIENCE


def _state(process: int) -> str:
    """The letter that `ps` prints (T and t: stopped); "gone" if there is no process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone" if sys.platform == "linux" else "R"


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["silence", number]:
            watch_silence(int(number))
        case ["cleanup"]:
            clean_up()
