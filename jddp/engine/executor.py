"""Send compiled steps to the devices, and keep track of the states.

A step reuses the memory of the state that it is given. So the executor keeps the newest state,
names the call that took an old one, and delays Ctrl-C while the new one is not yet kept.

    state, metrics = executor.send(step, state, inputs)
    executor.latest is state

This room knows whether the memory of a state has been taken, and nothing of the step itself.
"""

import collections
import contextlib
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

import jax

from jddp.distributed.waits import computing
from jddp.engine.state import Inputs, TrainState, check_state
from jddp.errors import ConfigError, UsageError
from jddp.typing import Metrics, PyTree

Result = TypeVar("Result")
Sent = tuple[TrainState, Metrics]
_CHECKS = {"jax_debug_nans": jax.debug_nans, "jax_debug_infs": jax.debug_infs}
_OF_CONSTRAINTS = ("is not found in mesh", "passed to with_sharding_constraint")


class Executor:
    """Sends steps, and keeps the newest state.

    Args:
      donate: Whether a step takes the memory of the state that it is given.
      platform: The hardware.

    Attributes:
      latest: The newest state that is whole; None before there is one.
    """

    def __init__(self, *, donate: bool, platform: str) -> None:
        self.latest: TrainState | None = None
        self._num_calls = 0
        self._donate, self._platform = donate, platform
        self._in_flight: collections.deque[Metrics] = collections.deque()
        # Weak, or the handle of every old state would be kept for the sake of a message.
        self._taken: weakref.WeakKeyDictionary[TrainState, int] = weakref.WeakKeyDictionary()

    def send(self, step: Callable[..., Sent], state: TrainState, inputs: Inputs) -> Sent:
        """Sends a step; returns its result, which need not be computed yet."""
        self._num_calls += 1
        with _interrupts_after(state):
            result = run_compiled(step, state, inputs)
            self.latest = result[0]
        if self._donate:
            self._taken[state] = self._num_calls
        if self._platform == "cpu":
            self._wait_for_room(result[1])
        return result

    def _wait_for_room(self, metrics: Metrics) -> None:
        # XLA:CPU deadlocks in its rendezvous once some thirty programs of many devices are waiting
        # (measured on jax 0.10.2), which an unbounded loop of steps reaches.
        self._in_flight.append(metrics)
        if len(self._in_flight) > 4:
            jax.block_until_ready(self._in_flight.popleft())

    def refuse_taken(self, state: TrainState) -> None:
        """Refuses a state whose memory a step has taken, or that lies on no device.

        Raises:
          UsageError: If a step has, with the number of its call; or if it is no state of a device.
        """
        check_state(state)
        if state.step.is_deleted():
            # JAX's own error names a buffer, but not the call that took it.
            number = self._taken.get(state)
            which = "another step" if number is None else f"step call {number} of this DataParallel"
            raise UsageError(
                f"This state was given to {which}, which reused its memory. Continue with the "
                "state that the step returned (ddp.latest is the newest), or build "
                "DataParallel(..., donate=False)."
            )


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


def run_compiled(function: Callable[..., Result], *args: PyTree) -> Result:
    """Calls a compiled function, for which the devices of other processes may be awaited."""
    with computing(args):
        return call(function, *args)


def checks_for_nan() -> list[Callable[[bool], contextlib.AbstractContextManager[None]]]:
    """The checks of JAX for NaN and infinity that are on: `jax.debug_nans`, `jax.debug_infs`."""
    return [check for name, check in _CHECKS.items() if getattr(jax.config, name)]


def _checked() -> contextlib.AbstractContextManager[None]:
    """While open, `jax_debug_nans` and `jax_debug_infs` are on in this thread if they are at all.

    JAX leaves the check off in a thread that was in a context with it off, and some of its own
    functions are, also those that look for the operation that made the first NaN.
    """
    checks = checks_for_nan()
    return checks[0](True) if checks else contextlib.nullcontext()


def call(function: Callable[..., Result], *args: PyTree) -> Result:
    """Calls a function that traces the user's model.

    Raises:
      ConfigError: If the model names an axis that there is not, or uses a value of another trace.
    """
    try:
        with _checked():
            return function(*args)
    except ValueError as error:
        # Of a constraint that was imported by name before the first model ran: `modules.mesh_axes`.
        if not any(words in str(error) for words in _OF_CONSTRAINTS):
            raise
        raise ConfigError(
            f"The model or loss constrains an array to axes of a mesh ({error}), and here each "
            "replica has its own rows whole. Call it as jax.lax.with_sharding_constraint, which is "
            "then left out; or leave it out."
        ) from error
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        name = str(error).split("unbound axis name:")[-1].strip().split(" ")[0].rstrip(".")
        raise ConfigError(
            f"The model or loss uses axis {name!r}, which is not the axis of the replicas. Name "
            f"that so: DataParallel(..., axis_name={name!r}), ddp.axis_name={name} in a config."
        ) from error
    except jax.errors.UnexpectedTracerError as error:
        raise ConfigError(
            "The model or loss uses a value of another trace, such as one that it kept from an "
            "earlier call. Hand it what it needs in the batch, or as constants=."
        ) from error
