"""Which signals ask a process to stop, and which of them are one."""

import signal
import time

# A second signal within this time is the first once more: schedulers, and GNU `timeout`, signal a
# process and then its group.
SAME_SECONDS = 2.0


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, Ctrl-C and a closed terminal, unless this process is to outlive it (`nohup`)."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *(() if outlives else (signal.SIGHUP,)))


class Repeats:
    """Tells a signal that repeats the first from one that means more."""

    def __init__(self) -> None:
        self._first: float | None = None

    def has(self) -> bool:
        """Whether the signal that has come now is only a repeat."""
        is_first, now = self._first is None, time.monotonic()
        self._first = self._first or now
        return not is_first and now - self._first < SAME_SECONDS
