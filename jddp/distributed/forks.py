"""Resources that a forked child gives up before a signal can reach it.

    with in_forked_children(give_up):       # as long as there is something to give up
        ...

A child of `multiprocessing` or `os.fork` has the handlers, pipes and files of its parent. A signal
to the child would count as one to the parent, and a pipe would stay open as long as the child
lives, although a reader waits for its end.
"""

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

_given_up: list[Callable[[], None]] = []
_masks = threading.local()  # of the thread that forks


@contextlib.contextmanager
def in_forked_children(give_up: Callable[[], None]) -> Iterator[None]:
    """While open, each forked child calls this function first; in reverse order of opening."""
    _register()
    _given_up.append(give_up)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # in a child, which has given it up
            _given_up.remove(give_up)


@contextlib.contextmanager
def ending_forked_children() -> Iterator[None]:
    """While open, an exception in a forked child ends that child, as if Python had ended it.

    Outside, it would count as an exception of the parent, whose files the child could write.
    """
    parent = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() == parent:
            raise
        os._exit(_report(error))


def _report(error: BaseException) -> int:
    """Reports an exception as Python does at the end of a program; returns the exit code."""
    code = 1
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    elif isinstance(error.code, int | None):
        code = (error.code or 0) & 255
    else:
        print(error.code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


@functools.cache
def _register() -> None:
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_give_up)


def _hold() -> None:
    """Holds back signals to the child until it has given up the resources of the parent."""
    stops = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _give_up() -> None:
    while _given_up:
        _given_up.pop()()
    _release()
