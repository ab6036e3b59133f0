"""A process that fails ends its job, and says so first.

Without this, a failure of one process is a riddle: the others wait for it in a collective, then for
minutes in JAX's shutdown barrier, and die of errors of their own. Here the first that fails tells
the others, with its exit code; they name it and leave with 81. A process that loses its connection
to another waits a moment for what that one has to say.

Only a process that the command line owns is ended like this.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import jax

from jddp.coordination import num_processes, process_index, publish, read

STOPPED, ANOTHER_FAILED = 75, 81
_KEY = "jddp/failed"
# What gloo and JAX say where a process has gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
_MOMENT = 1.0  # seconds in which a process that fails too says so itself
_leaving = threading.Lock()  # of the thread that ends this process
owns_process = False


@contextlib.contextmanager
def owned_process() -> Iterator[None]:
    """While open, this process is a command's own: it may be ended, and is if another fails."""
    global owns_process
    owns_process, over = True, threading.Event()
    thread = threading.Thread(target=_listen, args=(over,), name="jddp-failures", daemon=True)
    if num_processes() > 1:
        thread.start()
    try:
        yield
    finally:
        owns_process = False
        over.set()
    if thread.is_alive():
        thread.join()  # At exit Python aborts a thread that is inside of JAX.


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
            code, headline = ANOTHER_FAILED, f"another process has gone without a word: {headline}"
            print(f"jddp: {headline}", file=sys.stderr)
        _announce(code, headline)
        _exit(code)


def end(code: int, told: str) -> NoReturn:
    """Ends this process at once, for a reason that all processes know."""
    with _leaving:
        print(f"jddp: {told}", file=sys.stderr)
        _exit(code)


def _announce(code: int, headline: str) -> None:
    """Tells the others, unless another has been faster."""
    about = {"process": process_index(), "host": socket.gethostname(), "code": code}
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        publish(_KEY, json.dumps({**about, "headline": headline}))


def _listen(over: threading.Event) -> None:
    while not over.is_set():
        first = _read(0.5)
        if first is not None and first["process"] != process_index():
            time.sleep(_MOMENT)
            with _leaving:
                _follow(first)


def _read(seconds: float) -> dict[str, Any] | None:
    """What the first that failed has told, if any does in this time."""
    try:
        return dict(json.loads(read(_KEY, seconds, of=0)))
    except (TimeoutError, jax.errors.JaxRuntimeError):
        return None


def _follow(first: dict[str, Any]) -> NoReturn:
    """Leaves because another process has failed, or was stopped before there was a run to stop."""
    who, code = f"process {first['process']} on {first['host']}", first["code"]
    if code == STOPPED:
        print(f"jddp: {who} was stopped: {first['headline']}", file=sys.stderr)
        _exit(STOPPED)
    print(f"jddp: {who} failed first, with exit code {code}: {first['headline']}", file=sys.stderr)
    _exit(ANOTHER_FAILED)


def _exit(code: int) -> NoReturn:
    """Past every `finally` and barrier, in which a process of many would be held."""
    sys.stdout.flush()
    sys.stderr.flush()
    if num_processes() > 1:
        _say_that_it_is_gone()
    os._exit(code)


def _say_that_it_is_gone() -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        publish(f"{_KEY}/gone/{process_index()}", "")
    if process_index() == 0:  # The service ends with this process, and whoever misses it aborts.
        for process in range(1, num_processes()):
            with contextlib.suppress(TimeoutError, jax.errors.JaxRuntimeError):
                read(f"{_KEY}/gone/{process}", 3 * _MOMENT, of=process)
        time.sleep(_MOMENT / 5)  # in which they are
