"""Batches of one process: for training, from any position; for evaluation, each example once.

    batches = TrainBatches(examples, global_batch_size=128, seed=0)
    batch = next(batches)              # the rows of this process, a dict of numpy arrays
    batches.get_state()                # {"position": 128}: pass it to set_state to resume

Every process iterates over the same global batches and takes its own contiguous part of each (its
`Share`). So all processes together read the same rows as a single process, in the same order. A
partial batch is padded with real rows, whose mask is 0.

    for batch in eval_batches(examples, global_batch_size=1000):
        ...                            # the rows of this process, a dict of numpy arrays

Evaluation batches have each example exactly once, over all processes together, and can be iterated
any number of times. All processes take the same number of them; the last one may be smaller.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jddp.data.examples import Examples, NumpyBatch, Subset, as_examples
from jddp.data.order import ExampleOrder, Order
from jddp.data.transforms import Chain, Transform, chain_of
from jddp.ground.errors import ConfigError, DataError
from jddp.ground.names import refuses_unknown
from jddp.ground.names.synonyms import OF_BATCHES, OF_EVAL_BATCHES
from jddp.ground.typing import TRANSFORM, Batch, Shown

ENDLESS = 2**62


class TrainBatches(Shown):
    """An iterator over the batches of one process, endless or for a number of epochs.

    Batch `s` holds the positions of the run from `s * global_batch_size` on (see `Order`). Epochs
    follow each other without a gap: a batch may straddle two of them, no example is dropped, and
    only the last batch of a run can be partial. A partial batch is padded, and so is every batch
    that does not divide over the devices. All batches then have a "mask", which is 0 for padding.
    """

    @refuses_unknown("TrainBatches", OF_BATCHES)
    def __init__(
        self,
        examples: object,
        *,
        global_batch_size: int,
        seed: int | None = None,
        order: ExampleOrder | None = None,
        num_epochs: float | None = None,
        drop_remainder: bool = False,
        transforms: Sequence[Transform] = (),
        on_device: bool = False,
        multiple_of: int = 1,
        process_index: int | None = None,
        num_processes: int | None = None,
    ):
        """Starts at position 0.

        Args:
          examples: Examples to read, or a dict of arrays with a row for each.
          global_batch_size: Examples per step, over all processes.
          seed: Seed of the order, which shuffles each epoch, and of the augmentation.
          order: Order of the examples, given instead of a seed: an `Order` with weights, say.
          num_epochs: Number of epochs; None for endless batches.
          drop_remainder: Whether to end with the last full batch, instead of padding a partial one.
          transforms: Transforms of rows, such as augmentations.
          on_device: Whether the step transforms rows on the devices. Batches then hold them as they
            are stored, such as images of uint8, and the function under "transform".
          multiple_of: Divisor of the rows of a global batch after padding, such as the number of
            devices.
          process_index: Number of this process; by default JAX's, once it has joined a job, else 0.
          num_processes: Number of processes; each takes an equal part of a batch. By default JAX's
            number, else 1.

        Raises:
          ConfigError: If the batch does not divide over the processes, the seed is negative, or
            there is not exactly one of seed and order.
          DataError: If there are fewer examples than a batch holds.
        """
        examples = as_examples(examples)
        self.share = Share.of(process_index, num_processes)
        num_processes = self.share.num_processes
        self._rows_in_all = -(-global_batch_size // multiple_of) * multiple_of
        if global_batch_size < 1 or self._rows_in_all % num_processes:
            below = global_batch_size // num_processes * num_processes
            raise ConfigError(
                f"global_batch_size {global_batch_size} does not divide over {num_processes} "
                f"processes. Nearest: {f'{below} and ' if below else ''}{below + num_processes}."
            )
        if len(examples) < global_batch_size:
            raise DataError(
                f"the training data holds {len(examples)} examples, but one global batch needs "
                f"{global_batch_size}. Give more examples, or a smaller batch."
            )
        self.num_examples = len(examples)
        self.num_epochs = num_epochs
        self.global_batch_size = global_batch_size
        if (order is None) == (seed is None):
            raise ConfigError("TrainBatches needs a seed, or an order in its place. Give one.")
        self._order = order or Order(len(examples), seed or 0)
        self._stored, self._chain = chain_of(examples, transforms, on_device=on_device)
        self._on_device = on_device and bool(self._chain.transforms)
        self._end = ENDLESS
        self._is_full = drop_remainder or num_epochs is None
        if num_epochs is not None:
            # Refuses a number of epochs without a step.
            count_steps(num_epochs, len(examples), global_batch_size, drop_remainder)
            self._end = max(1, round(num_epochs * len(examples)))
        process_batch_size = self._rows_in_all // num_processes
        first = self.share.process_index * process_batch_size
        self._own = np.arange(process_batch_size) + first
        self._position = 0

    @property
    def settings(self) -> dict[str, object]:
        """Settings that must be equal for the batches of all processes, by name."""
        return {
            "num_examples": self.num_examples,
            "global_batch_size": self.global_batch_size,
            "rows of a batch, with padding": self._rows_in_all,
            "num_epochs": self.num_epochs,
            "drop_remainder": self._is_full,
            **self._order.settings,
            "transforms": str(self._chain.transforms),
            "on_device": self._on_device,
            "position": self._position,
            "num_processes": self.share.num_processes,
        }

    def close(self) -> None:
        """Frees resources; only `WorkerBatches` has any."""

    @property
    def is_padded(self) -> bool:
        """Whether a batch may be padded; if so, all batches have a "mask"."""
        is_short = not self._is_full and (self._end - self._position) % self.global_batch_size > 0
        return is_short or self._rows_in_all > self.global_batch_size

    def batch(self, position: int) -> Batch:
        """This process's rows of the global batch that begins at a position of the run."""
        return self.completed(self.rows(position))

    def rows(self, position: int) -> NumpyBatch:
        """The arrays of `batch`: all of it but the function that is for the devices."""
        own, end = position + self._own, min(position + self.global_batch_size, self._end)
        return self._rows(np.minimum(own, end - 1), own < end)

    def completed(self, rows: NumpyBatch) -> Batch:
        """The rows, with the function that transforms them on the devices, if there is one."""
        return rows | {TRANSFORM: self._chain} if self._on_device else rows

    @property
    def example(self) -> Batch:
        """A batch of one row, in the form of all batches."""
        return self.completed(self._rows(np.zeros(1, int), np.ones(1, bool)))

    def _rows(self, positions: np.ndarray, is_valid: np.ndarray) -> NumpyBatch:
        """The rows at these positions, with a mask of the valid ones if batches have masks."""
        batch = self._stored.take(self._order.examples_at(positions))
        if self._chain.num_draws:
            uniform = self._order.uniform(positions, self._chain.num_draws)
            batch = self._chain.with_draws(batch, uniform)
        if self.is_padded:
            counts = is_valid.astype(np.float32)
            mask = batch.get("mask", np.ones(len(counts), np.float32))
            batch = batch | {"mask": (mask.T * counts).T}  # Multiplied along the rows.
        return batch if self._on_device else self._chain(batch)

    def __repr__(self) -> str:
        """Number of examples, global batch size and position; reads no example."""
        is_endless = self._end == ENDLESS
        left = "endless" if is_endless else f"{len(self.positions_left()):,} steps left"
        head = f"TrainBatches: {self.num_examples:,} examples, {self.global_batch_size} a step"
        return f"{head}, at position {self._position:,}, {left}"

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self.positions_left():
            raise StopIteration
        batch = self.batch(self._position)
        self._position += self.global_batch_size
        return batch

    def positions_left(self) -> range:
        """Positions of the batches that are not yet delivered; very many if they are endless."""
        end = self._end - (self.global_batch_size - 1) * self._is_full
        return range(self._position, end, self.global_batch_size)

    def examples_before(self, state: dict[str, int]) -> np.ndarray:
        """Numbers of the examples in the last global batch, of all processes, before a state."""
        end = state["position"]
        first = max(0, end - self.global_batch_size)
        return self._order.examples_at(np.arange(first, min(end, self._end)))

    def get_state(self) -> dict[str, int]:
        """The number of delivered examples, which suffices to resume from here.

        It does not depend on processes, devices or the batch size. After a partial last batch,
        "end" is the position at which the examples ended, for a run that is extended.
        """
        end = {"end": self._end} if self._position > self._end else {}
        return {"position": self._position} | end

    def set_state(self, state: dict[str, int]) -> None:
        """Continues as if `state["position"]` examples had been delivered."""
        self._position = min(int(state["position"]), state.get("end", ENDLESS))


def count_steps(
    num_epochs: float, num_examples: int, global_batch_size: int, drop_remainder: bool = False
) -> int:
    """The number of batches in a number of epochs: at least one.

    Raises:
      ConfigError: If the number of epochs is not positive and finite.
      DataError: If only full batches count, and there are none.
    """
    if not 0 < num_epochs < float("inf"):
        raise ConfigError(f"num_epochs {num_epochs!r} is not a positive number, such as 2.")
    end = max(1, round(num_epochs * num_examples))
    if not drop_remainder:
        return -(-end // global_batch_size)
    if end < global_batch_size:
        raise DataError(
            f"{num_epochs} epochs of {num_examples} examples do not fill a batch of "
            f"{global_batch_size}. Take more epochs, a smaller batch, or drop_remainder=False."
        )
    return end // global_batch_size


class Share(NamedTuple):
    """One of several equal parts of the rows.

    Attributes:
      process_index: Number of the process.
      num_processes: Number of processes.
    """

    process_index: int
    num_processes: int

    def part_of(self, num_rows: int) -> tuple[int, int]:
        """Number of the first row of this share of a batch, and of the first row after it."""
        index, count = self
        return index * num_rows // count, (index + 1) * num_rows // count

    @classmethod
    def of(cls, process_index: int | None, num_processes: int | None) -> "Share":
        """The share with these numbers; None stands for the numbers of this process in its job.

        Raises:
          ConfigError: If there is no such process.
        """
        here = cls(0, 1)
        if "jax" in sys.modules:
            from jddp.distributed import coordination  # This imports JAX.

            here = cls(coordination.process_index(), coordination.num_processes())
        index = here.process_index if process_index is None else process_index
        count = here.num_processes if num_processes is None else num_processes
        if not 0 <= index < count:
            raise ConfigError(
                f"process_index={index} must be from 0 up, and below num_processes={count}. "
                "Without both they are JAX's, once it has joined a job."
            )
        return cls(int(index), int(count))


@dataclass(frozen=True, repr=False)
class _EvalBatches(Shown):
    """Evaluation batches, which can be iterated any number of times."""

    examples: Examples
    global_batch_size: int
    share: Share
    chain: Chain
    on_device: bool

    @property
    def settings(self) -> dict[str, object]:
        """Settings that must be equal for the batches of all processes, by name."""
        return {
            "num_examples": len(self.examples),
            "global_batch_size": self.global_batch_size,
            "num_processes": self.share.num_processes,
        }

    def limited(self, num_batches: int, seed: int) -> "_EvalBatches":
        """So many batches, of rows that are spread evenly over all: one of each equal section.

        Args:
          num_batches: Number of batches; with all of them nothing changes.
          seed: Seed that decides which row of a section is read, always the same.
        """
        num_rows = min(num_batches * self.global_batch_size, len(self.examples))
        sections = np.arange(num_rows + 1) * len(self.examples) // num_rows
        # Random rows: if classes take turns, every n-th row could be of one class.
        shares = Order(num_rows, seed, shuffle=False).uniform(np.arange(num_rows), 1)[:, 0]
        rows = sections[:-1] + (shares * np.diff(sections)).astype(np.int64)
        return replace(self, examples=Subset(self.examples, rows))

    def __repr__(self) -> str:
        return f"evaluation batches: {len(self.examples):,} examples in {len(self):,} batches"

    def __len__(self) -> int:
        return -(-len(self.examples) // self.global_batch_size)

    def __iter__(self) -> Iterator[Batch]:
        begin, end = self.share.part_of(self.global_batch_size)
        for first in range(0, len(self.examples), self.global_batch_size):
            last = min(first + end, len(self.examples))
            rows = self.examples.take(np.arange(first + begin, last))
            yield rows | {TRANSFORM: self.chain} if self.on_device else self.chain(rows)


@refuses_unknown("eval_batches", OF_EVAL_BATCHES)
def eval_batches(
    examples: object,
    *,
    global_batch_size: int,
    transforms: Sequence[Transform] = (),
    on_device: bool = False,
    process_index: int | None = None,
    num_processes: int | None = None,
) -> _EvalBatches:
    """Batches that hold each example exactly once, in order, over all processes together.

    Args:
      examples: Examples to read, or a dict of arrays with a row for each.
      global_batch_size: Examples per batch, over all processes.
      transforms: Transforms of rows; transforms that use random numbers are left out.
      on_device: Whether rows are transformed on the devices, as with `TrainBatches`.
      process_index: Number of this process; by default JAX's, once it has joined a job, else 0.
      num_processes: Number of processes; each takes an equal part of a batch. By default JAX's
        number, else 1.

    Returns:
      An iterable with a length, the same on every process. The last batch may be smaller, and on
      some processes empty.

    Raises:
      ConfigError: If `global_batch_size` is not positive, or there is no such process.
      DataError: If there are no examples.
    """
    examples = as_examples(examples)
    if global_batch_size < 1:
        raise ConfigError(f"global_batch_size {global_batch_size} is not positive. Take 1 or more.")
    if len(examples) == 0:
        raise DataError("the evaluation data holds 0 examples. At least one is needed.")
    share = Share.of(process_index, num_processes)
    stored, chain = chain_of(examples, transforms, on_device=on_device)
    return _EvalBatches(
        stored, global_batch_size, share, chain, on_device and bool(chain.transforms)
    )
