"""A process that fails reports it to the others, and the whole job ends.

Without this the others wait for it in a collective, then for minutes in JAX's shutdown barrier, and
end with unrelated errors. Here the first process that fails publishes its exit code and headline;
the others print it and exit (`ANOTHER_FAILED`). A process that loses its connection to another
waits a moment for that one's report.

Only a process that the command line owns is ended like this.
"""

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NoReturn

import jddp.distributed.coordination as job
from jddp.distributed.signals import is_at_prompt
from jddp.errors import ExitCode, report

_KEY, _GONE, _LEFT = "jddp/failed", "jddp/failed/gone", "jddp/left"
# Errors of gloo and JAX for a process that has ended.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
_MOMENT = 1.0  # seconds in which another process that fails reports it
_POLL_SECONDS = 0.2
_PATIENCE = 10.0  # seconds in which a computation ends that a process took part in before it left
_LINGER_SECONDS = 5.0
_END_SECONDS = 300.0  # JAX's own limit for the end of a process to wait for the others
_TOO_EARLY = "others still wait for it in a computation of all. Give all as many steps and batches."
_leaving = threading.Lock()  # of the thread that ends this process
owns_process = False


@contextlib.contextmanager
def owned_process() -> Iterator[None]:
    """While open, a command owns this process: it may be ended, and is if another fails."""
    global owns_process
    before, owns_process = owns_process, True
    try:
        yield
    except SystemExit as error:  # of a user's code: a command would take it for its own exit
        raise RuntimeError(f"the code of a user called sys.exit: {error!r}") from error
    finally:
        owns_process = before


def watch_over_job() -> None:
    """From here on this process of a job reports its failure, and ends when another fails.

    Called once, after it has joined the job. A notebook is left alone: its kernel lives on.
    """
    global owns_process
    if is_at_prompt():
        return
    owns_process, me, show = True, os.getpid(), sys.excepthook
    over = threading.Event()
    thread = threading.Thread(target=_listen, args=(over,), name="jddp-failures", daemon=True)
    thread.start()

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with _leaving:  # or another thread reports the reason, and ends this process
            show(kind, error, trace)
        if os.getpid() == me and job.is_connected():  # no fork of it
            default = ExitCode.INTERRUPTED if kind is KeyboardInterrupt else ExitCode.BUG
            code = getattr(error, "exit_code", default)
            leave(code, "".join(traceback.format_exception_only(error)))

    def end() -> None:
        if os.getpid() == me and job.is_connected():
            _wait_for_others(over, thread)

    sys.excepthook = fail
    atexit.register(end)  # so that it runs before JAX's


def _wait_for_others(over: threading.Event, thread: threading.Thread) -> None:
    """Delays the end of this process, whose exit code only Python knows, until all end.

    Where another fails first, or has waited in vain for this one, JAX's barrier is skipped.
    """
    until = time.monotonic() + _END_SECONDS
    while job.is_waiting_for(range(job.num_processes())) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)  # so that a process that waits later does not wait for this one
    over.set()
    thread.join()  # At exit Python aborts a thread that is inside of JAX.
    job.publish(f"{_LEFT}/{job.process_index()}", socket.gethostname())
    while len(job.published(_LEFT)) < job.num_processes() and time.monotonic() < until:
        if _read(_POLL_SECONDS) is not None:
            _publish_exit()
            return job.skip_shutdown()


def leave(code: int, message: str) -> NoReturn:
    """Ends this process of a job at once, and with it the others.

    Args:
      code: The exit code, unless this is only the consequence of another process's failure.
      message: The error; its first line is the headline for the others.
    """
    is_consequence = any(lost in message for lost in _LOST)
    first = _read(2 * _MOMENT) if is_consequence else None
    with _leaving:
        if first is not None:
            _follow(first)
        headline = (message.strip().splitlines() or [f"exit code {code}"])[0]
        if is_consequence:
            code = ExitCode.ANOTHER_FAILED
            headline = f"another process has ended without a report: {headline}"
            report(headline)
        _announce(code, headline, job.process_index(), socket.gethostname())
        _exit(code)


def end(code: int, message: str) -> NoReturn:
    """Ends this process at once, for a reason that all processes know."""
    with _leaving:
        report(message)
        _exit(code)


def _announce(code: int, headline: str, process: int, host: str) -> None:
    """Publishes a failure for the others, unless another process was faster."""
    failure = {"process": process, "host": host, "code": code, "headline": headline}
    job.try_publish(_KEY, json.dumps(failure))


def _listen(over: threading.Event) -> None:
    since = time.monotonic()  # when it began to wait for a process that has ended without failing
    while not over.is_set() and job.is_connected():
        first = _read(0.5)
        if first is not None and first["process"] != job.process_index():
            time.sleep(_MOMENT)
            with _leaving:
                _follow(first)
        left = job.published(_LEFT)
        if not (left and job.is_waiting_for(left)):
            since = time.monotonic()
        elif time.monotonic() - since > _PATIENCE:
            _announce(0, _TOO_EARLY, *next(iter(left.items())))


def _read(seconds: float) -> dict[str, Any] | None:
    """The report of the first process that failed, if one does in this time."""
    text = job.try_read(_KEY, seconds)
    return None if text is None else dict(json.loads(text))


def _follow(first: dict[str, Any]) -> NoReturn:
    """Exits because another process has failed, or was stopped before there was a run to stop."""
    name, code = f"process {first['process']} on {first['host']}", first["code"]
    if code == ExitCode.PREEMPTED:
        report(f"{name} was stopped: {first['headline']}")
        _exit(ExitCode.PREEMPTED)
    how = f"failed first, with exit code {code}" if code else "ended too early"
    report(f"{name} {how}: {first['headline']}")
    if not code:  # That process is still ending, and needs JAX's service, which may be here.
        time.sleep(_LINGER_SECONDS)
    _exit(ExitCode.ANOTHER_FAILED)


def _exit(code: int) -> NoReturn:
    """Exits past every `finally` and barrier, which would wait for the other processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    if job.num_processes() > 1:
        _publish_exit()
        if job.process_index() == 0:  # JAX's service ends with it, and others would abort.
            for process in range(1, job.num_processes()):
                job.try_read(f"{_GONE}/{process}", 3 * _MOMENT)
            time.sleep(_MOMENT / 5)  # until they have exited
    os._exit(code)


def _publish_exit() -> None:
    job.try_publish(f"{_GONE}/{job.process_index()}", "")
