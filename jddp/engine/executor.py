"""Send compiled steps to the devices, and keep track of the states.

A step reuses the memory of the state that it is given. So the executor keeps the newest state,
names the call that took an old one, and delays Ctrl-C while the new one is not yet kept.

    state, metrics = executor.send(call)
    executor.latest is state

This room knows whether the memory of a state has been taken, and nothing of the step itself.
"""

import collections
import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import jax

from jddp.engine.calls import run_compiled
from jddp.engine.compiled import Call
from jddp.engine.planned import Planned
from jddp.engine.state import TrainState
from jddp.ground.typing import Metrics

Stepped = tuple[TrainState, Metrics]


class Executor:
    """Sends steps, and keeps the newest state.

    Args:
      donate: Whether a step takes the memory of the state that it is given.
      platform: The hardware.

    Attributes:
      latest: The newest state that is whole; None before there is one.
      planned: The plan of the rows that it was made with; None before there are some.
    """

    def __init__(self, *, donate: bool, platform: str) -> None:
        self.latest: TrainState | None = None
        self.planned: Planned | None = None
        self._num_calls = 0
        self._donate = donate
        self._platform = platform
        self._in_flight: collections.deque[Metrics] = collections.deque()

    def send(self, step: Call) -> Stepped:
        """Sends a step; returns its result, which need not be computed yet."""
        self._num_calls += 1
        self.planned = step.planned
        with _interrupts_after(step.state):
            result = run_compiled(step.run, step.state, step.inputs)
            self.latest = result[0]
        if self._donate:
            object.__setattr__(step.state, "_taken_by", self._num_calls)
        if self._platform == "cpu":
            self._wait_for_room(result[1])
        return result

    def _wait_for_room(self, metrics: Metrics) -> None:
        # XLA:CPU deadlocks in its rendezvous once some thirty programs of many devices are waiting
        # (measured on jax 0.10.2), which an unbounded loop of steps reaches.
        self._in_flight.append(metrics)
        if len(self._in_flight) > 4:
            jax.block_until_ready(self._in_flight.popleft())


@contextlib.contextmanager
def _interrupts_after(state: TrainState) -> Iterator[None]:
    """Delays Ctrl-C from where a step has taken the state to where its result is kept.

    While the step is traced and compiled nothing is lost, and it is delivered at once.
    """
    handle, waiting = signal.getsignal(signal.SIGINT), []
    if not callable(handle) or threading.current_thread() is not threading.main_thread():
        yield  # where it ends the process or nothing, or is not handled
        return

    def note(number: int, frame: FrameType | None) -> None:
        if state.step.is_deleted():
            waiting.append((number, frame))
        else:
            handle(number, frame)

    # A handler, and not a signal mask: a masked signal may be delivered to another thread.
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handle)
        if waiting:
            handle(*waiting[0])
