"""A thread receives the stop signals, even while the main thread is inside C++.

    with Hearing(hear) as hearing:      # `hear(15)` is called in the thread, at the first SIGTERM
        ...

Python calls a handler in the main thread, between two bytecodes: not while XLA compiles, and
wherever that thread happens to be. An exception of a handler is lost in a callback of the garbage
collector, and ends the process in C++. So the handlers here raise nothing. C code writes the number
of a signal into a pipe at once (`signal.set_wakeup_fd`), and the thread reads the pipe.

The second signal ends the process at once, unless it comes within two seconds: then it repeats the
first.
"""

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from jddp.distributed.forks import in_forked_children
from jddp.distributed.resolve import is_at_prompt
from jddp.distributed.signals import (
    Repeats,
    is_abandoned,
    show_cursor,
    stop_signals,
    stop_signals_go_to,
    write_line,
)

_END = 0  # which is no signal


class Hearing:
    """While open, in the main thread, a thread receives the stop signals of this process.

    Args:
      hear: Function that is called in a thread with the first signal, once.
    """

    def __init__(self, hear: Callable[[int], None]) -> None:
        self._hear = hear
        self._repeats = Repeats()
        self._num_heard = 0
        self._heard = set[int]()  # signals that the thread has received
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "Hearing":
        """Starts the thread, and then takes the signals."""
        self._signals = stop_signals()
        self._reads, self._writes = _pipe()
        self._open.callback(self._close_pipe)
        self._thread = threading.Thread(target=self._listen, name="jddp-signals", daemon=True)
        self._thread.start()
        self._open.callback(self._end_thread)
        self._open.enter_context(in_forked_children(self._give_up))
        self._wakeup_before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        self._open.callback(self._restore_wakeup)
        self._open.enter_context(stop_signals_go_to(self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        """Restores the earlier handlers; in a forked child there is nothing left to restore."""
        self._open.close()

    def renew(self) -> None:
        """Takes signals back that a library has handled for a while, and left without a handler.

        Called in the main thread. Handlers and a wake-up descriptor that are in use stay.
        """
        for number in self._signals:
            if is_abandoned(signal.getsignal(number)):
                signal.signal(number, self._handle)
        self._is_woken()

    def _is_woken(self) -> bool:
        """Whether C writes signals into the pipe; starts this if no other program is woken."""
        before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        if before not in (-1, self._writes):  # of an event loop
            signal.set_wakeup_fd(before)
        return before == self._writes

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, once it runs Python code again."""
        if not self._is_woken() or number not in self._heard:
            self._write(number)
        if self._num_heard > 1 and number == signal.SIGINT:  # at a prompt, an ordinary request
            raise KeyboardInterrupt

    def _write(self, number: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writes, bytes([number]))

    def _listen(self) -> None:
        while (number := os.read(self._reads, 1)[0]) != _END:
            self._heard.add(number)
            if number in self._signals and not self._repeats.is_repeat():
                self._take(number)

    def _take(self, number: int) -> None:
        self._num_heard += 1
        if self._num_heard == 1:
            self._hear(number)
        elif not (is_at_prompt() and number == signal.SIGINT):
            write_line(f"{signal.Signals(number).name} again: exiting now")
            show_cursor()
            os._exit(128 + number)

    def _give_up(self) -> None:
        """Leaves the pipe to the parent, in a forked child."""
        self._restore_wakeup()
        self._open.pop_all()
        self._close_pipe()

    def _restore_wakeup(self) -> None:
        if (now := signal.set_wakeup_fd(-1)) not in (-1, self._writes):
            signal.set_wakeup_fd(now)  # of an event loop, which keeps it
            return
        with contextlib.suppress(OSError, ValueError):  # it was closed meanwhile
            signal.set_wakeup_fd(self._wakeup_before)

    def _end_thread(self) -> None:
        # Not by the end of the pipe, which a child of another program's fork may keep open.
        self._write(_END)
        self._thread.join()

    def _close_pipe(self) -> None:
        os.close(self._reads)
        os.close(self._writes)


def _pipe() -> tuple[int, int]:
    """The two ends of a pipe; neither gets the number of a closed standard stream."""
    ends = []
    for end in os.pipe():
        ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3))
        os.close(end)
    reads, writes = ends
    os.set_blocking(writes, False)
    return reads, writes
