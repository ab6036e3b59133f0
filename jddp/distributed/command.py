"""Runs a command as one process, or as one of several: reports a mistake, and ends.

    return run_command(lambda: verify(arguments))      # an exit code

A mistake of yours is one line on standard error and an exit code. Output without a reader is
dropped.
"""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from jddp.distributed.exits import process
from jddp.ground.errors import Error, ExitCode, log_printable, report


def tell(message: str) -> None:
    """Prints a message on standard error."""
    for line in message.split("\n"):
        report(line)


@contextlib.contextmanager
def lasting_streams() -> Iterator[None]:
    """Drops output that standard output and standard error cannot take, while open.

    A pipe without a reader (`| head`), a full disk and a closed stream (`>&-`) raise
    nothing, and characters that the locale does not have are escaped.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # No file of a run may get the number of a closed standard stream.
    os.close(descriptor)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_lasting, before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


class _Lasting(io.FileIO):
    """A file that drops output that cannot be written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _lasting(stream: Any) -> Any:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8", errors="replace")
    buffer = getattr(stream, "buffer", None)
    if not isinstance(getattr(buffer, "raw", buffer), io.FileIO):
        return stream  # The stream of a notebook or of a test.
    with contextlib.suppress(OSError):
        stream.flush()
    written = io.BufferedWriter(_Lasting(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(written, stream.encoding, "backslashreplace", line_buffering=True)


@lasting_streams()
def run_command(run: Callable[[], int | None]) -> int:
    """Runs a command; returns its exit code."""
    log_printable()
    try:
        code = process.exit_code = run() or ExitCode.DONE
        return code
    except Error as error:
        tell(error.in_shell)
        leave_job(error.exit_code, error)
        return error.exit_code


def leave_job(code: int, error: BaseException) -> None:
    """Ends one of several processes, and its job, at once, if this is one."""
    if "jax" in sys.modules:
        from jddp.distributed.coordination import num_processes
        from jddp.distributed.failure import end_job

        if num_processes() > 1:
            end_job(code, error)
