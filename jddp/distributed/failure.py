"""A process that fails ends its job, and says so first.

Without this, a failure of one process is a riddle: the others wait for it in a collective, then for
minutes in JAX's shutdown barrier, and die of errors of their own. Here the first that fails tells
the others, with its exit code; they name it and leave (`ANOTHER_FAILED`). A process that loses its
connection to another waits a moment for what that one has to say.

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

import jax

import jddp.distributed.coordination as job
from jddp.distributed.stopping import is_interactive
from jddp.errors import ExitCode

_KEY, _LEFT = "jddp/failed", "jddp/left"
# What gloo and JAX say where a process has gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
_MOMENT = 1.0  # seconds in which a process that fails too says so itself
_POLL_SECONDS = 0.2
_PATIENCE = 10.0  # seconds in which a computation ends in which one that has left took part
_LINGER_SECONDS = 5.0
_END_SECONDS = 300.0  # for which JAX too holds up the end of a process until all come to it
_TOO_EARLY = "others still wait for it in a computation of all. Give all as many steps and batches."
_leaving = threading.Lock()  # of the thread that ends this process
owns_process = False


@contextlib.contextmanager
def owned_process() -> Iterator[None]:
    """While open, this process is a command's own: it may be ended, and is if another fails."""
    global owns_process
    before, owns_process = owns_process, True
    try:
        yield
    except SystemExit as error:  # of a user's code: no command would know it from its own ends
        raise RuntimeError(f"the code of a user called sys.exit: {error!r}") from error
    finally:
        owns_process = before


def watch_over_job() -> None:
    """From here on to its end this process, one of many, leaves with the others or tells them why.

    Called once, when it has joined them. A notebook is left alone: its kernel is to live on.
    """
    global owns_process
    if is_interactive():
        return
    owns_process, me, show = True, os.getpid(), sys.excepthook
    over = threading.Event()
    thread = threading.Thread(target=_listen, args=(over,), name="jddp-failures", daemon=True)
    thread.start()

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with _leaving:  # or another thread says why, and ends this process
            show(kind, error, trace)
        if os.getpid() == me and job.is_connected():  # no fork of it
            own = ExitCode.INTERRUPTED if kind is KeyboardInterrupt else ExitCode.BUG
            code = getattr(error, "exit_code", own)
            leave(code, "".join(traceback.format_exception_only(error)))

    def end() -> None:
        if os.getpid() == me and job.is_connected():
            _wait_for_others(over, thread)

    sys.excepthook = fail
    atexit.register(end)  # so that it comes before JAX's


def _wait_for_others(over: threading.Event, thread: threading.Thread) -> None:
    """Holds up the end of this process, whose code only Python knows, until all have come to it.

    Where another fails first, or has waited in vain for this one, JAX's barrier is skipped.
    """
    until = time.monotonic() + _END_SECONDS
    while job.is_waiting_for(range(job.num_processes())) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)  # so that who waits later does not wait for this one's work
    over.set()
    thread.join()  # At exit Python aborts a thread that is inside of JAX.
    job.publish(f"{_LEFT}/{job.process_index()}", socket.gethostname())
    while len(job.published(_LEFT)) < job.num_processes() and time.monotonic() < until:
        if _read(_POLL_SECONDS) is not None:
            job.publish(f"{_KEY}/gone/{job.process_index()}", "")
            return job.skip_shutdown()


def leave(code: int, told: str) -> NoReturn:
    """Ends this process of a job at once, and with it the others.

    Args:
      code: Of the exit, unless this is only the consequence of another process's failure.
      told: What went wrong; its first line is the headline for the others.
    """
    is_consequence = any(lost in told for lost in _LOST)
    first = _read(2 * _MOMENT) if is_consequence else None
    with _leaving:
        if first is not None:
            _follow(first)
        headline = (told.strip().splitlines() or [f"exit code {code}"])[0]
        if is_consequence:
            code, headline = (
                ExitCode.ANOTHER_FAILED,
                f"another process has gone without a word: {headline}",
            )
            print(f"jddp: {headline}", file=sys.stderr)
        _announce(code, headline, job.process_index(), socket.gethostname())
        _exit(code)


def end(code: int, told: str) -> NoReturn:
    """Ends this process at once, for a reason that all processes know."""
    with _leaving:
        print(f"jddp: {told}", file=sys.stderr)
        _exit(code)


def _announce(code: int, headline: str, process: int, host: str) -> None:
    """Tells the others of a failure, unless another has been faster."""
    about = {"process": process, "host": host, "code": code, "headline": headline}
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        job.publish(_KEY, json.dumps(about))


def _listen(over: threading.Event) -> None:
    since = time.monotonic()  # when it began to wait for one that has left in good order
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
    """What the first that failed has told, if any does in this time."""
    try:
        return dict(json.loads(job.read(_KEY, seconds, of=0)))
    except (TimeoutError, jax.errors.JaxRuntimeError):
        return None


def _follow(first: dict[str, Any]) -> NoReturn:
    """Leaves because another process has failed, or was stopped before there was a run to stop."""
    who, code = f"process {first['process']} on {first['host']}", first["code"]
    if code == ExitCode.PREEMPTED:
        print(f"jddp: {who} was stopped: {first['headline']}", file=sys.stderr)
        _exit(ExitCode.PREEMPTED)
    how = f"failed first, with exit code {code}" if code else "ended too early"
    print(f"jddp: {who} {how}: {first['headline']}", file=sys.stderr)
    if not code:  # it ends at its own pace, and needs JAX's service, which may be here, till then
        time.sleep(_LINGER_SECONDS)
    _exit(ExitCode.ANOTHER_FAILED)


def _exit(code: int) -> NoReturn:
    """Past every `finally` and barrier, in which a process of many would be held."""
    sys.stdout.flush()
    sys.stderr.flush()
    if job.num_processes() > 1:
        _say_that_it_is_gone()
    os._exit(code)


def _say_that_it_is_gone() -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        job.publish(f"{_KEY}/gone/{job.process_index()}", "")
    if job.process_index() == 0:  # The service ends with it, and whoever misses it aborts.
        for process in range(1, job.num_processes()):
            with contextlib.suppress(TimeoutError, jax.errors.JaxRuntimeError):
                job.read(f"{_KEY}/gone/{process}", 3 * _MOMENT, of=process)
        time.sleep(_MOMENT / 5)  # in which they are
