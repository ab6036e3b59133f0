"""Messages between the processes of a job, without a device: JAX's coordination service.

    votes = gather("save/100", "", timeout_seconds=600)      # values of all processes, in order
    step = from_first("restore", "100", timeout_seconds=60)  # value of process 0
    agree("config or version", {"sha256": digest})           # equal in all, or an error

Collectives would do for most messages, but not for messages about a device that hangs or a process
that fails. In a job of one process each call returns its own value.

This process records each computation and answer of other processes while it waits for it. So a
process that ends too early is known:

    with computing(args):        # a call that ends when all devices have taken part
        result = compiled(*args)
    with awaiting({2}):          # an answer of process 2
        text = read(...)
    is_waiting_for({2})          # any thread may ask

Usually a computation is only sent, and its arrays show that it has not ended. But XLA computes a
small program on a CPU within the call, when there are no arrays yet.
"""

import collections
import contextlib
import gc
import json
import os
import signal
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
from jax._src import compiler, distributed, xla_bridge
from jaxlib import _jax

from jddp.distributed.exits import in_shell
from jddp.distributed.identity import NUMBERS
from jddp.ground.errors import UsageError, refuse_differences
from jddp.ground.typing import PyTree

BUSY_SECONDS = 120.0  # Limit for processes that have joined a job, and may still be busy.

_uses: collections.Counter[str] = collections.Counter()
_lock = threading.Lock()


def num_processes() -> int:
    """Number of processes of the job, without initializing devices."""
    return distributed.global_state.num_processes or 1


def process_index() -> int:
    """Number of this process, without initializing devices."""
    return distributed.global_state.process_id or 0


def keep_own_programs() -> None:
    """Lets this process write into JAX's cache of programs, where only process 0 writes.

    For processes on CPUs: JAX's name of a program has the process that compiles it there, so no
    other process finds what process 0 has written, and would compile all at every start.
    """
    as_first = types.SimpleNamespace(process_id=0, client=distributed.global_state.client)
    vars(compiler)["distributed"] = types.SimpleNamespace(global_state=as_first)


def explain_unjoined(environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """The mistake of a process that has not joined the job its launcher has started, and a way out.

    Numbers that are incomplete or contradict each other describe no job. Schedulers, from the third
    pair on, do not count where a user types.

    Returns:
      None if there is no such job, or this process has joined it.
    """
    for name, rank in NUMBERS[:2] if in_shell(environ) else NUMBERS:
        count, number = environ.get(name, ""), environ.get(rank, "")
        is_job = count.isdecimal() and number.isdecimal() and int(number) < int(count) > 1
        if is_job and jax.process_count() == 1:
            return (
                f"{name}={count}: a launcher has started {count} processes, of which this is "
                f"number {number}, but it has not joined them: each would train by itself.",
                "Add two lines before JAX is used: `from jddp import distributed` and "
                "`distributed.initialize(distributed.resolve_identity())`. To train by itself on "
                f"purpose, unset {name}.",
            )
    return None


def refuse_unjoined() -> None:
    """Refuses to train in one process of several that have not connected.

    Raises:
      UsageError: If a launcher's variables describe a job of several, and JAX has one process.
    """
    if (mistake := explain_unjoined()) is not None:
        raise UsageError(" ".join(mistake))


def gather(key: str, value: str, *, timeout_seconds: float) -> list[str]:
    """The values of all processes, in their order.

    Args:
      key: Name of the exchange. All processes call equally often with the same key.
      value: Value of this process.
      timeout_seconds: Time to wait for each of the others.

    Raises:
      TimeoutError: If a process has not answered in this time; the message names it.
    """
    return _exchange(key, value, range(num_processes()), timeout_seconds)


def from_first(key: str, value: str, *, timeout_seconds: float) -> str:
    """The value of process 0, on every process; other values are ignored.

    Raises:
      TimeoutError: If process 0 has not answered in this time.
    """
    return _exchange(key, value, range(1), timeout_seconds)[0]


def agree(subject: str, values: Mapping[str, str]) -> None:
    """Compares all processes' values with the values of process 0, before their first collective.

    Args:
      subject: Common name of the values, for the error.
      values: The values of this process, by name.

    Raises:
      ProcessMismatchError: On every process, if any value differs.
    """
    mine = json.dumps(values)
    texts = gather(f"agree/{subject}", mine, timeout_seconds=BUSY_SECONDS)
    of_all = ((str(process), json.loads(text)) for process, text in enumerate(texts))
    refuse_differences("process", subject, of_all)


def collect(key: str, value: str, *, timeout_seconds: float) -> list[str]:
    """Like `gather`, for an exchange that is repeated endlessly, for example for each batch.

    Only process 0 reads all values, and removes the values of the previous exchange.
    """
    if num_processes() == 1:
        return [value]
    number = _next_use(key)
    name = f"jddp/{key}/{number}"
    if process_index() != 0:
        publish(f"{name}/{process_index()}", value)
        return list(json.loads(_await(f"{name}/all", timeout_seconds, of=0)))
    others = range(1, num_processes())
    values = [value, *(_await(f"{name}/{i}", timeout_seconds, of=i) for i in others)]
    publish(f"{name}/all", json.dumps(values))
    # All have read the previous values, or they would not have sent a value to this exchange.
    _client().key_value_delete(f"jddp/{key}/{number - 1}")
    return values


def _next_use(key: str) -> int:
    """The number of this use of a key, from 1."""
    with _lock:
        _uses[key] += 1
        return _uses[key]


def _exchange(key: str, value: str, senders: range, timeout_seconds: float) -> list[str]:
    if num_processes() == 1:
        return [value]
    name = f"jddp/{key}/{_next_use(key)}"
    if process_index() in senders:
        publish(f"{name}/{process_index()}", value)
    return [_await(f"{name}/{i}", timeout_seconds, of=i) for i in senders]


def _await(name: str, timeout_seconds: float, *, of: int) -> str:
    """The value under a name; meanwhile this process is known to wait for process `of`."""
    with awaiting({of}):
        return read(name, timeout_seconds, of=of)


def publish(name: str, value: str) -> None:
    """Publishes a value under a new name; a process may wait for it already."""
    _client().key_value_set(name, value)


def read(name: str, timeout_seconds: float, *, of: int) -> str:
    """The value under a name, as soon as it is published.

    Raises:
      TimeoutError: If process `of` has not published it in this time.
    """
    try:
        return str(_client().blocking_key_value_get(name, int(timeout_seconds * 1000)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise TimeoutError(f"process {of} has not answered for {timeout_seconds:.0f} s") from None


def try_publish(name: str, value: str) -> None:
    """Publishes a value in a job, unless another process was first, or process 0 has left."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        if is_connected():
            publish(name, value)


def try_read(name: str, timeout_seconds: float) -> str | None:
    """The value under a name; None if it is late, or without a job or process 0."""
    with contextlib.suppress(TimeoutError, jax.errors.JaxRuntimeError):
        return read(name, timeout_seconds, of=0) if is_connected() else None
    return None


def published(prefix: str) -> dict[int, str]:
    """The values under `prefix/<number of a process>`, by these numbers; does not wait."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        found = _client().key_value_dir_get(prefix) if is_connected() else []
        return {int(name.rpartition("/")[2]): value for name, value in found}
    return {}


def is_connected() -> bool:
    """Whether processes can reach each other: one may have called `jax.distributed.shutdown`."""
    return _client() is not None


def take_sigterm_back() -> None:
    """Gives SIGTERM back to its handler in Python, or to the system, if JAX has taken it.

    If a program calls `jax.distributed.initialize` itself, JAX has a handler in C++. Python does
    not see it, and it reports a signal only to a program that asks JAX.
    """
    is_taken = distributed.global_state.preemption_sync_manager is not None
    handler = signal.getsignal(signal.SIGTERM)
    in_main = threading.current_thread() is threading.main_thread()
    if is_taken and in_main and handler is not None:
        signal.signal(signal.SIGTERM, handler)


def skip_shutdown() -> None:
    """Lets this process end without JAX's shutdown barrier, which waits for all processes."""
    state = distributed.global_state
    # The destructors of these objects would wait for other processes.
    kept: list[object] = [state.client, state.service]
    kept.append(kept)
    gc.freeze()  # Without this, Python would collect the cycle at its end.
    state.client = state.service = None


def listen_at(address: str) -> None:
    """Lets gloo, which connects CPU devices, listen at this address; before devices are used."""

    def make_client() -> object:
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=_client(), hostname=address)
        return xla_bridge.make_cpu_client(collectives=collectives)

    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


@contextlib.contextmanager
def background(step: Callable[[], bool], *, pause_seconds: float = 0.0) -> Iterator[None]:
    """Calls `step` in a thread until it returns True, with a pause before each call, while open."""
    closed = threading.Event()

    def run() -> None:
        while not closed.wait(pause_seconds) and not step():
            pass

    thread = threading.Thread(target=run, name="jddp", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()


def _client() -> Any:
    return distributed.global_state.client


# What each wait is for: a tree with arrays, or the numbers of processes.
_under_way: dict[object, PyTree] = {}


@contextlib.contextmanager
def computing(arguments: PyTree) -> Iterator[None]:
    """Records that this thread sends or runs a computation, while open.

    Args:
      arguments: A tree with arrays of all devices that take part.
    """
    wait = object()
    _under_way[wait] = arguments
    try:
        yield
    finally:
        del _under_way[wait]


def awaiting(processes: Collection[int]) -> contextlib.AbstractContextManager[None]:
    """Records that this thread waits for an answer of each of these processes, while open."""
    return computing(frozenset(processes))


def is_waiting_for(processes: Collection[int]) -> bool:
    """Whether this process waits for any of these processes, or has sent them a computation."""
    if any(_concerns(what, processes) for what in list(_under_way.values())):
        return True
    if xla_bridge.backends_are_initialized():
        for x in jax.live_arrays():
            with contextlib.suppress(RuntimeError):  # An array may be deleted now.
                if not x.is_fully_addressable and not x.is_ready() and _is_on(x, processes):
                    return True
    return False


def _concerns(what: PyTree, processes: Collection[int]) -> bool:
    if isinstance(what, frozenset):
        return not what.isdisjoint(processes)
    arrays = [x for x in jax.tree.leaves(what) if isinstance(x, jax.Array)]
    return any(not x.is_fully_addressable and _is_on(x, processes) for x in arrays)


def _is_on(x: jax.Array, processes: Collection[int]) -> bool:
    devices: set[jax.Device] = x.sharding.device_set
    return any(device.process_index in processes for device in devices)
