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
import signal
import threading

import jddp.distributed.coordination as job
from jddp.distributed import early
from jddp.distributed.hearing import Hearing
from jddp.distributed.signals import write_line

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
        self._hearing: Hearing | None = None
        self._open = contextlib.ExitStack()

    def agreed(self) -> bool:
        """Whether all stop here."""
        if self._hearing is not None:
            self._hearing.renew()
        with self._lock:
            self._num_calls += 1
            return self._last is not None and self._num_calls >= self._last

    def __enter__(self) -> "StopSignals":
        """Handles the signals, if this is the main thread, and waits for those of others."""
        if job.num_processes() > 1:
            self._open.enter_context(job.background(self._listen))
        if threading.current_thread() is threading.main_thread():
            self._hearing = self._open.enter_context(Hearing(self._hear))
        return self

    def __exit__(self, *_: object) -> None:
        """Restores the handlers."""
        self._open.close()

    def _hear(self, number: int) -> None:
        if early.is_early():
            early.leave(number)
        name = signal.Signals(number).name
        again = "press Ctrl-C" if name == "SIGINT" else f"send {name}"
        write_line(f"{name}: finishing this step, then stopping; {again} again to quit now")
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
