"""Training batches, prefetched to the devices.

A thread reads ahead and places batches on the devices while the step computes. Batches that were
read but not yet taken do not count: the position belongs to the batch that was taken last.
"""

import base64
import copy
import hashlib
import json
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jddp.data import TrainBatches
from jddp.data.periods import Reached
from jddp.distributed.coordination import gather
from jddp.engine.state import by_path
from jddp.ground.errors import DataError, ProcessMismatchError
from jddp.ground.typing import Batch, JsonObject
from jddp.modules.rows import as_arrays

# Batches that wait on the devices: one more than needed, because reading sometimes takes longer.
DEPTH = 2
NUM_AHEAD = DEPTH + 1  # batches on the devices besides the step's batch: one waits for its place
_END = object()
SECONDS = 120.0  # Limit for other processes, which may still be busy.
MOST_BYTES = 128  # Largest size at which rows may be equal by chance.
WAY_OUT = (
    "Give each process its own rows, as jddp.data.TrainBatches and eval_batches do if the process "
    "has joined its job before. If equal rows are intended: checks=jddp.Checks(same_batches=True)."
)


class Source:
    """Prefetched batches that can be repositioned.

    Args:
      batches: Iterable of batches. Its iterator may have `get_state` and `set_state`, as in grain,
        or it may have `state_dict` and `load_state_dict`, as in torchdata and Hugging Face. Other
        batches are counted, and read again from the start on resume.
      put: Function that places a batch on the devices.
      change: Function of each batch, called before; None for none.

    Attributes:
      position: The position of the last batch taken, for a checkpoint.
    """

    def __init__(
        self,
        batches: Any,
        put: Callable[[Batch], Batch],
        change: Callable[[Batch], Batch] | None = None,
    ) -> None:
        self._batches = batches
        self._train = batches if isinstance(batches, TrainBatches) else None
        self._iterator = iter(batches)
        self._put = put
        self._change = change
        self._peeked: list[tuple[Batch, JsonObject]] = []
        self._first: Batch = None  # First batch of `TrainBatches`, until reading begins.
        self._num_read = 0
        self._num_before = 0  # batches before the position to resume from
        self.position = self._position()  # The iterator may have delivered batches before.
        self._ready: queue.Queue[tuple[Batch | BaseException, JsonObject]] = queue.Queue(DEPTH)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def peek(self) -> Batch:
        """The first batch, as arrays on the host, without taking it."""
        if self._train is not None:
            if self._first is None:
                self._first = as_arrays(self._train.batch(0))  # Reading it here starts no workers.
            return self._first
        if not self._peeked:
            self._peeked.append(self._read_next())
        return as_arrays(self._peeked[0][0])

    @property
    def steps_per_epoch(self) -> float | None:
        """Number of steps in a pass over `TrainBatches`; None for other batches."""
        own = self._train
        return None if own is None else own.num_examples / own.global_batch_size

    @property
    def num_left(self) -> int:
        """Number of batches to come, of some epochs."""
        return len(self._batches.positions_left())

    def reached(self, step: int, position: JsonObject) -> Reached:
        """How far a run has come with a step, after which it is at a position."""
        if self._train is None:
            return Reached(step)
        state = position["state"]
        return Reached(step, state.get("end", state["position"]), self._train.num_examples)

    def examples_before(self, position: JsonObject) -> list[int] | None:
        """Numbers of the examples in the global batch that ends there; None if unknown."""
        own = self._train
        return None if own is None else own.examples_before(position["state"]).tolist()

    def move_to(self, position: JsonObject) -> None:
        """Moves to a saved position; batches without a state are replayed up to it."""
        num_taken, state = position["num_taken"], position.get("state")
        if state is not None and self._set_state(state):
            self._peeked.clear()
            self._num_read = num_taken
        elif num_taken:
            logging.getLogger("jddp").warning(
                "The training iterator has no get_state and set_state: replaying %d batches to "
                "resume, which is exact only if they are the same each time.",
                num_taken,
            )
        self._num_before = num_taken
        self.position = position

    def start(self, num_batches: int) -> None:
        """Starts to prefetch so many batches, once; later ones stay in the caller's iterator."""
        self._first = None
        self._thread = threading.Thread(
            target=self._read_ahead, args=(num_batches,), name="jddp-batches", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch, on the devices.

        Raises:
          DataError: If there is no further batch.
        """
        batch, position = self._ready.get()
        if isinstance(batch, BaseException):
            raise batch
        self.position = position
        return batch

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        while not self._ready.empty():  # The thread needs room to put its batch and end.
            self._ready.get_nowait()
        if self._thread is not None:
            self._thread.join(timeout=1)  # An iterator may block forever.

    def _read_ahead(self, num_batches: int) -> None:
        for _ in range(num_batches):
            try:
                while self._num_read < self._num_before:
                    self._read()
                batch, position = self._read()
                # The iterator may overwrite the batch once it is asked for the next.
                item = jax.block_until_ready(self._put(as_arrays(batch))), position
            except BaseException as error:  # `__next__` raises it in the loop.
                item = error, {}
            self._ready.put(item)
            if self._closed.is_set() or isinstance(item[0], BaseException):
                return

    def _read(self) -> tuple[Batch, JsonObject]:
        """The next batch, on the host, and the position after it."""
        batch, position = self._peeked.pop() if self._peeked else self._read_next()
        self._num_read += 1
        return batch, position | {"num_taken": self._num_read}

    def _position(self) -> JsonObject:
        state = self._get_state()
        return {"num_taken": 0} if state is None else {"num_taken": 0, "state": state}

    def _read_next(self) -> tuple[Batch, JsonObject]:
        batch = next(self._iterator, _END)
        if batch is _END:
            ended = f"The training batches ended after {self._num_read} batches"
            raise DataError(f"{ended}. Give an endless iterator, or fewer steps.")
        return batch if self._change is None else self._change(batch), self._position()

    def _get_state(self) -> object:
        if hasattr(self._iterator, "get_state"):
            state = self._iterator.get_state()
            if isinstance(state, bytes):
                return {"base64": base64.b64encode(state).decode()}
        elif hasattr(self._batches, "state_dict"):
            state = self._batches.state_dict()
        else:
            return None
        # The iterator may change it in place, while batches are read ahead.
        return copy.deepcopy(state)

    def _set_state(self, state: Any) -> bool:
        if hasattr(self._iterator, "set_state"):
            is_bytes = isinstance(state, dict) and state.keys() == {"base64"}
            own = base64.b64decode(state["base64"]) if is_bytes else copy.deepcopy(state)
            self._iterator.set_state(own)
        elif hasattr(self._batches, "load_state_dict"):
            self._batches.load_state_dict(copy.deepcopy(state))
            self._iterator = iter(self._batches)
        else:
            return False
        return True


def refuse_same_rows(name: str, batch: Batch) -> None:
    """Refuses a first batch that several processes have.

    Processes that read the same rows repeat each other's work, and count every row of an
    evaluation several times. A job of one process exchanges nothing here.

    Args:
      name: Argument of `fit` from which it comes.
      batch: The batch, on the host or on devices of this process.

    Raises:
      ProcessMismatchError: On every process, if several have the same rows, unless all rows are
        equal, or so few and small that they may be the same by chance.
    """
    if jax.process_count() == 1:
        return
    texts = gather(f"given/{name}", digest_of_rows(batch), timeout_seconds=SECONDS)
    for process, text in enumerate(texts):
        if text and text in texts[:process]:
            raise ProcessMismatchError(
                f"{name}= of processes {texts.index(text)} and {process} are the same: the first "
                f"batch has the same rows on each ({text}). {WAY_OUT}"
            )


def digest_of_rows(batch: Batch) -> str:
    """A digest of the rows; empty if equal digests would not prove that rows are the same.

    This holds if all rows of a process are equal, as in a synthetic batch, if all values together
    have a few bytes, and if an array is spread over processes.
    """
    digest = hashlib.sha256()
    num_bytes = 0
    for path, x in sorted(by_path(as_arrays(batch)).items()):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return ""
        array = np.asarray(x)
        if array.dtype.hasobject or array.ndim == 0:
            continue
        digest.update(json.dumps([path, str(array.dtype), array.shape]).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
        first = array[:1].tobytes()
        differ = len(array) == 1 or any(row.tobytes() != first for row in array)
        num_bytes += array.nbytes * differ
    return digest.hexdigest()[:12] if num_bytes > MOST_BYTES else ""
