"""A sink behind a guard: whatever it does, it neither stops nor slows the training.

    guarded = GuardedSink("wandb", make)
    guarded.begin(start)          # a thread makes the sink
    guarded.log(record)           # never waits
    guarded.close()               # waits for half a minute at most

A sink may fail, be slow, or hang, for example because its network is down. Its first failure is
reported in one line, and at the end the number of records that it has lost.
"""

import contextlib
import copy
import logging
import queue
import threading
from collections.abc import Callable, Iterator

from jddp.trainer.reports.sink import Sink, Start
from jddp.typing import Record

MOST_WAITING = 1000  # records
SECONDS_TO_CLOSE = 30.0
log = logging.getLogger("jddp")


class GuardedSink:
    """A sink that passes records to another sink, in a thread.

    Args:
      name: Name of the other sink, for its failures.
      make: Function that makes it.
      most_waiting: Number of records that may wait for it; more are lost.
      seconds_to_close: Time in which it takes the waiting records, and closes.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[Start], Sink],
        *,
        most_waiting: int = MOST_WAITING,
        seconds_to_close: float = SECONDS_TO_CLOSE,
    ) -> None:
        self._name, self._make = name, make
        self._most_waiting, self._seconds_to_close = most_waiting, seconds_to_close
        self._waiting: queue.SimpleQueue[Record | None] = queue.SimpleQueue()  # None is the end
        self._num_given = self._num_taken = 0
        self._is_reported = False
        self._thread: threading.Thread | None = None

    def begin(self, start: Start) -> None:
        """Begins to make the sink, and to pass records to it."""
        self._thread = threading.Thread(target=self._run, args=(start,), daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        """Passes a record on, unless too many wait already."""
        self._num_given += 1
        if self._waiting.qsize() < self._most_waiting:
            self._waiting.put(record)
        else:
            self._report(f"takes no record, and {self._most_waiting:,} wait")

    def close(self) -> None:
        """Waits for the sink to close, for a limited time; reports the records that are lost."""
        if self._thread is None:
            return
        self._waiting.put(None)
        self._thread.join(self._seconds_to_close)
        if self._thread.is_alive():
            self._report(f"has not closed within {self._seconds_to_close:g} s")
        if num_lost := self._num_given - self._num_taken:
            log.warning("sink %s: %d of %d records lost", self._name, num_lost, self._num_given)

    def _run(self, start: Start) -> None:
        with self._reporting("begin"):
            sink = self._make(start)
            with self._reporting("close"):
                self._pass_on(sink)

    def _pass_on(self, sink: Sink) -> None:
        while (record := self._waiting.get()) is not None:
            with self._reporting(f"take the record of step {record['step']}"):
                sink.log(copy.deepcopy(record))  # which it may change
                self._num_taken += 1
        sink.close()

    @contextlib.contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # also an exit, with which a thread ends in silence
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._report(f"cannot {what}: {reason.rstrip('.')}")

    def _report(self, what: str) -> None:
        """Reports the first failure."""
        if not self._is_reported:
            self._is_reported = True
            log.warning("sink %s %s. The training continues.", self._name, what)
