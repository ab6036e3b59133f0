"""Signals that ask a process to stop: repeats of them, a user at a prompt, programs kept apart."""

import contextlib
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# A second signal within this time is the first once more: schedulers, and GNU `timeout`, signal a
# process and then its group.
SAME_SECONDS = 2.0


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, Ctrl-C and a closed terminal, unless this process is to outlive it (`nohup`)."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *(() if outlives else (signal.SIGHUP,)))


@contextlib.contextmanager
def stop_signals_go_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """While open, the stop signals call a handler."""
    # None stands for a handler that Python cannot restore.
    before = {x: signal.signal(x, handler) or signal.SIG_DFL for x in stop_signals()}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def start_apart(program: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts a small program of jddp that shares no stream and no Ctrl-C with this process.

    Args:
      program: File of the program, which imports only the standard library.
      *arguments: Arguments of the program.

    Returns:
      The process; its standard input, without a buffer, ends with this process.
    """
    command, nowhere = [sys.executable, "-I", "-S", program, *arguments], subprocess.DEVNULL
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": nowhere, "stderr": nowhere}
    return subprocess.Popen(command, bufsize=0, start_new_session=True, **pipes)


class Repeats:
    """Distinguishes a signal that repeats the first from a second one."""

    def __init__(self) -> None:
        self._first = math.inf

    def is_repeat(self) -> bool:
        """Whether the signal that has come now is only a repeat."""
        before, self._first = self._first, min(self._first, now := time.monotonic())
        return before <= now < before + SAME_SECONDS


def is_at_prompt() -> bool:
    """Whether this is a Python prompt or a notebook, which continues when a call has ended."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules
