"""Signals that ask a process to stop, received even while its main thread is inside C++.

    with leaves_at_once():              # slow imports follow
        ...
        process.is_early = False        # the first step has ended
    with Hearing(hear) as hearing:      # `hear(15)` is called in a thread, at the first SIGTERM
        ...

Imports, data, connecting and compiling can take minutes, longer than a scheduler waits. As long as
there is nothing to save, a command exits at once on a signal; in a job the other processes exit
too. Then `requests` takes the signals. A second signal ends the process at once, unless it comes
within two seconds: then it repeats the first.

Python calls a handler in the main thread, between two bytecodes: not while XLA compiles, and
wherever that thread happens to be. An exception of a handler is lost in a callback of the garbage
collector, and ends the process in C++. So the handlers here raise nothing. C code writes the number
of a signal into a pipe at once (`signal.set_wakeup_fd`), and a thread reads the pipe.

Python itself needs a moment before the first line of a program. A signal in this moment has the
system's default effect: the process ends by that signal (143 for SIGTERM).
"""

import contextlib
import fcntl
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from jddp.distributed.exits import exit_now, is_at_prompt, process, show_cursor, write_line
from jddp.ground.errors import ExitCode

# A second signal within this time repeats the first: schedulers, and GNU `timeout`, signal a
# process and then its group.
SAME_SECONDS = 2.0
Handler = Callable[[int, FrameType | None], None]
_END = 0  # No signal has this number.
_given_up: list[Callable[[], None]] = []
_masks = threading.local()  # The mask of the thread that forks.


@contextlib.contextmanager
def in_forked_children(give_up: Callable[[], None]) -> Iterator[None]:
    """Lets each forked child call this function first, while open; in reverse order of opening.

    A child of `multiprocessing` or `os.fork` has the handlers, pipes and files of its parent. A
    signal to the child would count as a signal to the parent. A pipe would stay open as long as the
    child lives, although a reader waits for its end.
    """
    _register()
    _given_up.append(give_up)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # A child has given it up already.
            _given_up.remove(give_up)


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


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, Ctrl-C, and SIGHUP of a closed terminal unless it is ignored (`nohup`)."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *(() if outlives else (signal.SIGHUP,)))


@contextlib.contextmanager
def stop_signals_go_to(handler: Handler) -> Iterator[None]:
    """Lets stop signals call a handler, while open; a forked child gets earlier handlers back.

    If a library installs a handler for one of them meanwhile, it keeps that handler.
    """
    # None stands for a handler that Python cannot restore.
    before = {x: signal.signal(x, handler) or signal.SIG_DFL for x in stop_signals()}

    def restore() -> None:
        for number, previous in before.items():
            if signal.getsignal(number) == handler:
                signal.signal(number, previous)
        before.clear()

    try:
        with in_forked_children(restore):
            yield
    finally:
        restore()


class Repeats:
    """Distinguishes a repeat of the first signal from a second signal."""

    def __init__(self) -> None:
        self._first = float("inf")

    def is_repeat(self) -> bool:
        """Whether the signal that has just come is only a repeat."""
        now = time.monotonic()
        before = self._first
        self._first = min(self._first, now)
        return before <= now < before + SAME_SECONDS


class Signals:
    """The stop signals that a launcher has received.

    Attributes:
      numbers: Numbers of the signals, in order; a repeat of the first is left out.
    """

    def __init__(self) -> None:
        self.numbers = list[int]()
        self._repeats = Repeats()

    def received(self) -> contextlib.AbstractContextManager[object]:
        """Receives signals while open; they end nothing."""
        return stop_signals_go_to(self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._repeats.is_repeat():
            self.numbers.append(number)


class Hearing:
    """Lets a thread receive the stop signals of this process; opened in the main thread.

    Args:
      hear: Function that is called in a thread with the first signal, once.
    """

    def __init__(self, hear: Callable[[int], None]) -> None:
        self._hear = hear
        self._repeats = Repeats()
        self._num_heard = 0
        self._heard = set[int]()  # Signals that the thread has received.
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

    def _is_woken(self) -> bool:
        """Whether C writes signals into the pipe; starts this if no other program is woken."""
        before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        if before not in (-1, self._writes):  # An event loop has set it.
            signal.set_wakeup_fd(before)
        return before == self._writes

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, once it runs Python code again."""
        if not self._is_woken() or number not in self._heard:
            self._write(number)
        if self._num_heard > 1 and number == signal.SIGINT:  # A second Ctrl-C at a prompt.
            raise KeyboardInterrupt

    def _write(self, number: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writes, bytes([number]))

    def _listen(self) -> None:
        while (number := os.read(self._reads, 1)[0]) != _END:
            self._heard.add(number)
            if number not in self._signals or self._repeats.is_repeat():
                continue
            self._num_heard += 1
            if self._num_heard == 1:
                self._hear(number)
            elif not (is_at_prompt() and number == signal.SIGINT):
                write_line(f"{signal.Signals(number).name} again: exiting now")
                show_cursor()
                exit_now(128 + number)

    def _give_up(self) -> None:
        """Leaves the pipe to the parent, in a forked child."""
        self._restore_wakeup()
        self._open.pop_all()
        self._close_pipe()

    def _restore_wakeup(self) -> None:
        if (now := signal.set_wakeup_fd(-1)) not in (-1, self._writes):
            signal.set_wakeup_fd(now)  # An event loop has set it, and keeps it.
            return
        with contextlib.suppress(OSError, ValueError):  # It may be closed by now.
            signal.set_wakeup_fd(self._wakeup_before)

    def _end_thread(self) -> None:
        # The end of the pipe would not do: a child of a foreign fork may keep the pipe open.
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


@contextlib.contextmanager
def leaves_at_once() -> Iterator[None]:
    """Lets this process exit at once on a stop signal while open, as long as it is early."""
    if threading.current_thread() is not threading.main_thread():  # It gets no signals.
        yield
        return
    before = process.is_early
    process.is_early = True
    try:
        with Hearing(_hear):
            yield
    finally:
        process.is_early = before


class Stopped(BaseException):
    """A signal arrived while there was nothing to save."""

    exit_code = ExitCode.PREEMPTED


def leave_early(number: int) -> NoReturn:
    """Ends this process, and its job, because of a signal."""
    error: BaseException
    if number == signal.SIGINT:
        code = ExitCode.INTERRUPTED
        error = KeyboardInterrupt()
        text = "interrupted. The same command resumes from the last checkpoint."
    else:
        text = f"{signal.Signals(number).name}: stopped before the first step."
        text += " The same command resumes."
        code = ExitCode.PREEMPTED
        error = Stopped(text)
    write_line(text)
    show_cursor()
    try:
        if process.end_job is not None:
            process.end_job(code, error)
        from jddp.distributed.failure_file import describe_failure, write_failure
        from jddp.distributed.identity import resolve_identity

        write_failure(describe_failure(resolve_identity().process_id, code, error))
    finally:
        exit_now(code)


def _hear(number: int) -> None:
    if process.is_early:
        leave_early(number)
    name = signal.Signals(number).name
    write_line(f"{name}: exiting when all is written; send it again to exit now")
