"""What runs the processes of a launch, wherever they are, and the signals that stop it.

`node_runner` runs them on this machine, and on others beside it; `ray_job` on the nodes of Ray.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Protocol, runtime_checkable

from jddp.distributed.signals import Repeats, stop_signals_go_to
from jddp.launcher.outcome import Failure


class Signals:
    """The stop signals that a launcher has received.

    Attributes:
      numbers: Their numbers, in order; one that only repeats the first is left out.
    """

    def __init__(self) -> None:
        self.numbers = list[int]()
        self._repeats = Repeats()

    def received(self) -> AbstractContextManager[object]:
        """While open, signals are received, and end nothing."""
        return stop_signals_go_to(self._receive)

    @contextmanager
    def exiting(self) -> Iterator[None]:
        """While open, a signal ends this program, also one that was received before.

        Raises:
          SystemExit: With 128 and the number of the signal.
        """
        with stop_signals_go_to(self._exit):
            self._exit_if_any()
            yield
            self._exit_if_any()  # if Python has dropped the exception of the handler

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._repeats.is_repeat():
            self.numbers.append(number)

    def _exit(self, number: int, frame: FrameType | None) -> None:
        self._receive(number, frame)
        self._exit_if_any()

    def _exit_if_any(self) -> None:
        if self.numbers:
            sys.exit(128 + self.numbers[0])


@runtime_checkable
class Runner(Protocol):
    """Runs the processes of a launch to the end of the last attempt."""

    def run(self, signals: Signals) -> Failure | None:
        """Starts all processes, and restarts all where that may help.

        Args:
          signals: Stop signals of the launcher, which the processes get as they are received.

        Returns:
          The first failure of the last attempt, once it is reported; None if there is none.
        """
