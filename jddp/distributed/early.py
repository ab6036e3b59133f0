"""A command exits at once on a stop signal, as long as there is nothing to save.

    with leaves_at_once():       # before imports, which take seconds
        ...
        end()                    # the first step has ended

Imports, data, connecting and compiling can take minutes, longer than a scheduler waits. In a job
the other processes exit too. Once there is something to save, `requests` takes the signals. After
that, the process is already ending, and only a second signal ends it at once.

Python itself needs a moment before the first line of a program. A signal in this moment has the
system's default effect: the process ends by that signal (143 for SIGTERM).
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

from jddp.distributed.hearing import Hearing
from jddp.distributed.signals import show_cursor, write_line
from jddp.errors import ExitCode

_JOIN_SECONDS = 3.0  # in which processes connect once they have found each other
_is_early = False
_is_settled = threading.Event()  # unless this process is connecting to its job
_is_settled.set()
_end_job: Callable[[int, BaseException], NoReturn] | None = None


class Stopped(BaseException):
    """A signal arrived while there was nothing to save."""

    exit_code = ExitCode.PREEMPTED


@contextlib.contextmanager
def leaves_at_once() -> Iterator[None]:
    """While open, this process exits at once on a stop signal, until `end` is called."""
    global _is_early
    if threading.current_thread() is not threading.main_thread():  # which gets no signals
        yield
        return
    before = _is_early
    _is_early = True
    try:
        with Hearing(_hear):
            yield
    finally:
        _is_early = before


@contextlib.contextmanager
def joining() -> Iterator[None]:
    """While open, this process connects to others, which would wait in vain if it exited.

    On a signal it exits once it can also end the job, or after a moment.
    """
    _is_settled.clear()
    try:
        yield
    finally:
        _is_settled.set()


def joined(end_job: Callable[[int, BaseException], NoReturn]) -> None:
    """From here on this process ends a job, by calling this with its exit code and the reason."""
    global _end_job
    _end_job = end_job


def end() -> None:
    """From here on there is something to save, or to report."""
    global _is_early
    _is_early = False


def is_early() -> bool:
    """Whether this process is to exit at once."""
    return _is_early


def leave_early(number: int) -> NoReturn:
    """Ends this process, and its job, because of a signal."""
    error: BaseException
    if number == signal.SIGINT:
        code = ExitCode.INTERRUPTED
        error = KeyboardInterrupt()
        text = "interrupted. The same command resumes from the last checkpoint."
    else:
        text = f"{signal.Signals(number).name}: stopped before the first step."
        text += " The same command resumes."
        code = ExitCode.PREEMPTED
        error = Stopped(text)
    write_line(text)
    show_cursor()
    try:
        _is_settled.wait(_JOIN_SECONDS)
        if _end_job is not None:
            _end_job(code, error)
        _keep(code, error)
    finally:
        os._exit(code)


def _keep(code: int, error: BaseException) -> None:
    """Keeps the reason for the end of this process, if it is a failure."""
    from jddp.distributed.failure_file import describe_failure, write_failure
    from jddp.distributed.resolve import resolve_identity

    write_failure(describe_failure(resolve_identity().process_id, code, error))


def _hear(number: int) -> None:
    if _is_early:
        leave_early(number)
    name = signal.Signals(number).name
    write_line(f"{name}: exiting when all is written; send it again to exit now")
