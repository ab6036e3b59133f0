"""A process that fails reports it to the others, and the whole job ends.

Without this, the others would wait for it in a collective, then for minutes in JAX's shutdown
barrier, and end with unrelated errors. Here the first process that fails publishes its failure
(`failure_file`) at the coordinator, which decides which process was first. The others print this
failure, keep it in their files and exit (`ANOTHER_FAILED`). A process that loses its connection to
another process waits a moment for a report from it. If a process was killed, `jddp.launch` writes
the report into the file that it gives its processes, and they read it there.

A process that ends without failing reports at its end that it has left, with the exit code of its
command (only the launcher sees the code of your own program), and waits for the others. If another
process waits for it longer than `_PATIENCE`, for the same computation or answer, that is the first
failure. If all end at about the same time, none of them waits.

Only a process that the command line owns is ended in this way.
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
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from jddp.distributed import coordination as service
from jddp.distributed import failure_file
from jddp.distributed.coordination import is_waiting_for
from jddp.distributed.exits import exit_now, is_at_prompt, process, show_cursor
from jddp.distributed.identity import LAUNCHED
from jddp.ground.errors import Error, ExitCode, report
from jddp.ground.typing import JsonObject

_KEY, _GONE, _LEFT, _HOST = "jddp/failed", "jddp/failed/gone", "jddp/left", "jddp/host"
_MOMENT = 1.0  # Seconds for another process that fails to report its failure.
_POLL_SECONDS = 0.2
_PATIENCE = 6.0  # Seconds for a computation to end after a process that took part has left.
_LINGER_SECONDS = 5.0
_END_SECONDS = 300.0  # JAX's own limit for a process to wait for the others at its end.
_leaving = threading.Lock()  # Held by the thread that ends this process.


@contextlib.contextmanager
def owned_process() -> Iterator[None]:
    """Lets a command own this process while open: it may be ended, and is if another fails."""
    before = process.is_owned
    process.is_owned = True
    try:
        yield
    except SystemExit as error:  # A command would take the exit of user code for its own.
        raise RuntimeError(f"user code called sys.exit: {error!r}") from error
    finally:
        process.is_owned = before


def watch_over_job() -> None:
    """Makes this process of a job report its failure, and end when another fails.

    It is called after the process has joined the job. A notebook is left alone: its kernel
    continues.
    """
    if is_at_prompt() or process.end_job is not None:
        return
    process.is_owned = True
    process.end_job = end_job
    service.try_publish(f"{_HOST}/{service.process_index()}", socket.gethostname())
    me = os.getpid()
    listening = contextlib.ExitStack()
    listening.enter_context(service.background(Listener().listen))

    def end() -> None:
        if os.getpid() == me and service.is_connected():
            _wait_for_others(listening)

    atexit.register(end)  # This runs before JAX's own function.


def keep_uncaught(number: int) -> None:
    """Keeps an uncaught exception from now on, and ends the job if this process has joined it.

    Args:
      number: Number of this process.
    """
    me = os.getpid()
    show = sys.excepthook

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with _leaving:  # Another thread may already be ending this process.
            show(kind, error, trace)
        code = ExitCode.INTERRUPTED if kind is KeyboardInterrupt else ExitCode.BUG
        if os.getpid() != me:  # This is a fork.
            return
        if process.end_job is not None and service.is_connected():
            end_job(getattr(error, "exit_code", code), error)
        if not _is_consequence(error):
            failure_file.write_failure(failure_file.describe_failure(number, code, error))

    if not (is_at_prompt() or getattr(show, "__module__", "") == __name__):
        sys.excepthook = fail


def _wait_for_others(listening: contextlib.ExitStack) -> None:
    """Delays the end of this process until all end.

    If another one fails first, or has waited in vain for this one, JAX's barrier is skipped.
    """
    until = time.monotonic() + _END_SECONDS
    me = service.process_index()
    while is_waiting_for(range(service.num_processes())) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)  # A process that waits later then does not wait for this one.
    listening.close()  # At exit Python aborts a thread that is inside JAX.
    service.try_publish(f"{_LEFT}/{me}", json.dumps(process.exit_code))
    while len(service.published(_LEFT)) < service.num_processes() and time.monotonic() < until:
        if _first_failure(_POLL_SECONDS) is not None:
            service.try_publish(f"{_GONE}/{me}", "")
            if me == 0:
                _outlast(range(1, service.num_processes()), _LINGER_SECONDS)
            return service.skip_shutdown()


def end_job(code: int, error: BaseException) -> NoReturn:
    """Ends this process of a job at once, and with it the others.

    Args:
      code: The exit code, unless this is only the consequence of another process's failure.
      error: Exception that has ended this process.
    """
    is_consequence = _is_consequence(error)
    first = _first_failure(2 * _MOMENT) if is_consequence else None
    with _leaving:
        if first is not None:
            _follow(first)
        code = ExitCode.ANOTHER_FAILED if is_consequence else code
        failure = failure_file.describe_failure(service.process_index(), code, error)
        if is_consequence:
            report(failure_file.headline(failure))
        service.try_publish(_KEY, json.dumps(failure))  # The first report wins.
        _exit(code, _first_failure(_MOMENT) or failure)


def _is_consequence(error: BaseException) -> bool:
    if isinstance(error, Error):  # An error of jddp names its own reason, such as missing storage.
        return False
    text = "".join(traceback.format_exception_only(error))
    return failure_file.IS_LOST.search(text) is not None


def end_process(failure: JsonObject, message: str) -> NoReturn:
    """Ends this process at once, for a failure that all processes know."""
    with _leaving:
        report(message)
        _exit(failure["exit_code"], failure)


def _was_killed(first: JsonObject) -> bool:
    """Whether the process that failed first was ended by a signal."""
    return first["exception"] is None and (first["exit_code"] or 0) > 128


class Listener:
    """Notices in a thread that the job has failed, or waits for a process that has left."""

    _since: float | None = None  # The time from which on this process waits for one that has left.

    def listen(self) -> bool:
        """Follows the first failure once there is one; returns whether the job is over."""
        if not service.is_connected():
            return True
        file = os.environ.get(failure_file.VARIABLE, "") if os.environ.get(LAUNCHED) else ""
        found = failure_file.read_failure(Path(file))
        if found and found["exit_code"] != ExitCode.HANG:  # A hang is known to all processes.
            service.try_publish(_KEY, json.dumps(found))
        first = _first_failure(_POLL_SECONDS if file else 0.5)
        if first is not None and first["process"] != service.process_index():
            if not _was_killed(first):  # This process may fail too, and report its own error.
                time.sleep(_MOMENT)
            with _leaving:
                _follow(first)
        left = service.published(_LEFT)
        if not (left and is_waiting_for(left)):
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
        elif time.monotonic() > self._since + _PATIENCE:
            blame_who_left()
        return False


def blame_who_left() -> bool:
    """Makes a process that has left the first failure; returns whether there is one."""
    left = service.published(_LEFT) if process.end_job is not None else {}
    if not left:
        return False
    number, text = next(iter(left.items()))
    known: JsonObject = {"host": host_of(number), "step": None, "phase": None}
    ended = failure_file.describe_failure(number, json.loads(text), **known)
    service.try_publish(_KEY, json.dumps(ended))
    return True


def host_of(number: int) -> str | None:
    """The machine of a process, as it has reported it."""
    return service.published(_HOST).get(number)


def _first_failure(seconds: float) -> JsonObject | None:
    """The failure of the first process that failed, if one does in this time."""
    text = service.try_read(_KEY, seconds)
    return None if text is None else dict(json.loads(text))


def _follow(first: JsonObject) -> NoReturn:
    """Exits because another process has failed, or was stopped before its run began."""
    code = first["exit_code"]
    report(failure_file.headline(first))
    _exit(code if code == ExitCode.PREEMPTED else ExitCode.ANOTHER_FAILED, first)


def _exit(code: int, first: JsonObject) -> NoReturn:
    """Exits past every `finally` and barrier: they would wait for the other processes."""
    failure_file.write_failure(first)
    show_cursor()
    sys.stdout.flush()
    sys.stderr.flush()
    service.try_publish(f"{_GONE}/{service.process_index()}", "")
    if service.process_index() == 0:  # Others abort without JAX's service.
        dead = first["process"] if _was_killed(first) else 0
        others = {*range(1, service.num_processes())} - {dead}
        has_left = first["process"] in service.published(_LEFT)
        if others:
            _outlast(others, 3 * _MOMENT)  # The time is for all of them together.
        if has_left:  # It is still ending: Python may take its time.
            time.sleep(_LINGER_SECONDS)
    exit_now(code)


def _outlast(others: Iterable[int], seconds: float) -> None:
    """Waits until the others have exited: they need JAX's service in this process."""
    until = time.monotonic() + seconds
    for number in others:
        service.try_read(f"{_GONE}/{number}", max(0.0, until - time.monotonic()))
    time.sleep(_MOMENT / 5)
