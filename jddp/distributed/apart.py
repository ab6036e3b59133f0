"""Starts a small program that watches this process, and that survives if this one is killed."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

from jddp.distributed.signals import in_forked_children

END_SECONDS = 5.0  # for the program to end after its input


@contextlib.contextmanager
def started_apart(program: str, *arguments: str) -> Iterator[IO[bytes]]:
    """While open, the program runs; it shares no stream and no Ctrl-C with this process.

    Args:
      program: File of the program, which imports only the standard library.
      *arguments: Arguments of the program.

    Yields:
      The standard input of the program, without a buffer; it ends with this process.
    """
    command = [sys.executable, "-I", "-S", program, *arguments]
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
        # A child that kept it open would keep the program from ending.
        try:
            with in_forked_children(process.stdin.close):
                yield process.stdin
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a program by the end of its input; kills it if it does not run, as after SIGSTOP."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it was killed
        process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
