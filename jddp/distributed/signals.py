"""Signals that ask a process to stop: handlers and repeated signals."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

from jddp.distributed.forks import in_forked_children

# A second signal within this time repeats the first: schedulers, and GNU `timeout`, signal a
# process and then its group.
SAME_SECONDS = 2.0
Handler = Callable[[int, FrameType | None], None]


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, Ctrl-C and a closed terminal, unless this process is to outlive it (`nohup`)."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *(() if outlives else (signal.SIGHUP,)))


@contextlib.contextmanager
def stop_signals_go_to(handler: Handler) -> Iterator[tuple[signal.Signals, ...]]:
    """While open, the stop signals call a handler, but not those of a forked child.

    Yields:
      The signals. If a library installs a handler for one of them meanwhile, it keeps that handler.
    """
    # None stands for a handler that Python cannot restore.
    before = {x: signal.signal(x, handler) or signal.SIG_DFL for x in stop_signals()}

    def restore() -> None:
        for number, previous in before.items():
            if (now := signal.getsignal(number)) == handler or is_abandoned(now):
                signal.signal(number, previous)
        before.clear()

    try:
        with in_forked_children(restore):
            yield tuple(before)
    finally:
        restore()


def is_abandoned(handler: object) -> bool:
    """Whether a library has left this handler behind, after it has handled a signal for a while.

    A loop of asyncio sets Python's default when it is closed; a loop that is not closed leaves a
    handler that does nothing.
    """
    is_default = handler in (signal.SIG_DFL, signal.default_int_handler)
    return is_default or getattr(handler, "__module__", None) == "asyncio.unix_events"


class Repeats:
    """Distinguishes a signal that repeats the first from a second one."""

    def __init__(self) -> None:
        self._first = math.inf

    def is_repeat(self) -> bool:
        """Whether the signal that has just come is only a repeat."""
        now = time.monotonic()
        before = self._first
        self._first = min(self._first, now)
        return before <= now < before + SAME_SECONDS


def write_line(text: str) -> None:
    """Writes a line directly, past all buffers and locks that an interrupted thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"jddp: {text}\n".encode())


def show_cursor() -> None:
    """Shows the cursor again, which a live line has hidden; for use before `os._exit`."""
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, b"\x1b[?25h")
