"""Stops a job gracefully: a signal to any one process ends all after the same step.

    with StopSignals() as signals:
        while not signals.agreed():      # called as often, at the same places, by every process
            ...

A process that is signalled informs the others through the coordination service. Each then sends
how often it has called `agreed`, and its next call waits until all have: the call after the last of
them is where all stop. Nothing is sent before a signal comes.

The second signal ends a process at once, unless it comes within two seconds: then it repeats the
first. In a notebook, whose kernel lives on, it raises `KeyboardInterrupt`.
"""

import contextlib
import itertools
import os
import signal
import socket
import threading
from types import FrameType

import jddp.distributed.coordination as job
from jddp.distributed.signals import Repeats, is_at_prompt, stop_signals, stop_signals_go_to

_SECONDS = 30.0  # for which the others may be busy, at most
_numbers = itertools.count()


class StopSignals:
    """While open, SIGTERM, SIGINT and SIGHUP ask all processes of the job to stop together.

    Attributes:
      name: The signal that came first, to whichever process; None before.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._key = f"jddp/stop/{next(_numbers)}"
        self._num_calls = 0
        self._last: int | None = None  # the call whose answer is yes
        self._lock = threading.Lock()
        self._num_signals, self._repeats = 0, Repeats()
        self._open = contextlib.ExitStack()

    def agreed(self) -> bool:
        """Whether all stop here."""
        with self._lock:
            self._num_calls += 1
            return self._last is not None and self._num_calls >= self._last

    def __enter__(self) -> "StopSignals":
        """Handles the signals, if this is the main thread, and waits for those of others."""
        if job.num_processes() > 1:
            self._open.enter_context(job.background(self._listen))
        if threading.current_thread() is threading.main_thread():
            self._take_signals()
        return self

    def __exit__(self, *_: object) -> None:
        """Restores the handlers."""
        self._open.close()

    def _take_signals(self) -> None:
        reads, writes = socket.socketpair()
        writes.setblocking(False)
        self._open.enter_context(reads)
        self._open.enter_context(job.background(lambda: self._read(reads)))
        self._open.enter_context(writes)  # closed before that thread is joined: it reads the end
        self._open.enter_context(stop_signals_go_to(self._handle))
        # The number of each signal also comes through this socket, while the main thread computes.
        before = signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
        self._open.callback(signal.set_wakeup_fd, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, once that runs Python code again."""
        if self._num_signals > 1 and number == signal.SIGINT:
            raise KeyboardInterrupt

    def _read(self, wakeups: socket.socket) -> bool:
        """Reads a signal, also while the main thread computes; returns whether there is no more."""
        if not (received := wakeups.recv(1)):
            return True
        if received[0] in stop_signals() and not self._repeats.is_repeat():
            self._num_signals += 1
            name = signal.Signals(received[0]).name
            if self._num_signals == 1:
                _write(f"{name}: stopping after the step under way; once more to leave at once")
                self._ask(name)
            elif not (is_at_prompt() and received[0] == signal.SIGINT):
                _write(f"{name} again: leaving at once")
                os._exit(128 + received[0])
        return False

    def _ask(self, name: str) -> None:
        if job.num_processes() > 1:
            return job.try_publish(self._key, name)
        self._stop(name)

    def _listen(self) -> bool:
        name = job.try_read(self._key, 1.0)
        if name is not None:
            self._stop(name)
        return name is not None or not job.is_connected()

    def _stop(self, name: str) -> None:
        with self._lock:
            calls = job.gather(self._key, str(self._num_calls), timeout_seconds=_SECONDS)
            self.name, self._last = name, max(map(int, calls)) + 1


def _write(text: str) -> None:
    """Writes a line of jddp's past every buffer and lock that the interrupted thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"jddp: {text}\n".encode())
