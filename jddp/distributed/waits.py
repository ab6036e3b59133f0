"""Records the computations and answers of other processes for which this process waits.

    with computing(args):        # a call that ends when all devices have taken part
        result = compiled(*args)
    with awaiting({2}):          # an answer of process 2
        text = read(...)
    is_waiting_for({2})          # in any thread

Usually a computation is only sent, and its arrays show that it has not ended. But XLA computes a
small one on a CPU within the call, when there are no arrays yet.
"""

import contextlib
import time
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import jax
from jax._src import xla_bridge

from jddp.typing import PyTree


@dataclass(eq=False)
class _Wait:
    """A wait of one thread: for the devices of these arrays, or for processes by their numbers."""

    what: PyTree


_Awaited = _Wait | jax.Array
_under_way: set[_Wait] = set()


@contextlib.contextmanager
def computing(arguments: PyTree) -> Iterator[None]:
    """While open, this thread sends or runs a computation.

    Args:
      arguments: A tree with arrays of all devices that take part.
    """
    with _noted(arguments):
        yield


@contextlib.contextmanager
def awaiting(processes: Collection[int]) -> Iterator[None]:
    """While open, this thread waits for an answer of each of these processes."""
    with _noted(frozenset(processes)):
        yield


@contextlib.contextmanager
def _noted(what: PyTree) -> Iterator[None]:
    wait = _Wait(what)
    _under_way.add(wait)
    try:
        yield
    finally:
        _under_way.remove(wait)


def is_waiting_for(processes: Collection[int]) -> bool:
    """Whether this process waits for any of these processes."""
    return bool(_awaited(processes))


class LongestWait:
    """The time for which this process has waited for the same thing, measured between calls."""

    def __init__(self) -> None:
        self._seen: list[tuple[weakref.ref[_Awaited], float]] = []

    def seconds(self, processes: Collection[int]) -> float:
        """The longest wait for one thing from these processes, since a call first saw it."""
        now = time.monotonic()
        awaited = _awaited(processes)
        # Weak, or this would keep the memory of arrays; ids are unique while their arrays live.
        seen = {id(x): since for ref, since in self._seen if (x := ref()) is not None}
        times = [seen.get(id(x), now) for x in awaited]
        self._seen = [(weakref.ref(x), since) for x, since in zip(awaited, times, strict=True)]
        return now - min(times, default=now)


def _awaited(processes: Collection[int]) -> list[_Awaited]:
    """The waits, and the arrays that are not computed yet, in which these processes take part."""
    found: list[_Awaited] = [x for x in list(_under_way) if _concerns(x.what, processes)]
    if not xla_bridge.backends_are_initialized():
        return found
    for x in jax.live_arrays():
        with contextlib.suppress(RuntimeError):  # deleted meanwhile
            if not x.is_fully_addressable and not x.is_ready() and _is_on(x, processes):
                found.append(x)
    return found


def _concerns(what: PyTree, processes: Collection[int]) -> bool:
    if isinstance(what, frozenset):
        return not what.isdisjoint(processes)
    arrays = [x for x in jax.tree.leaves(what) if isinstance(x, jax.Array)]
    return any(not x.is_fully_addressable and _is_on(x, processes) for x in arrays)


def _is_on(x: jax.Array, processes: Collection[int]) -> bool:
    devices: set[jax.Device] = x.sharding.device_set
    return any(device.process_index in processes for device in devices)
