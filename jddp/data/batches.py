"""Batches of one process: endless and resumable to train on, each example once to evaluate.

    batches = TrainBatches(examples, global_batch_size=128, seed=0)
    batch = next(batches)              # the rows of this process, a dict of numpy arrays
    batches.get_state()                # {"position": 1}: give it to set_state to resume

Every process walks through the same global batches and takes its own contiguous part of each, so
that all processes together read what one process would have read, in the same order.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jddp.data.augment import Augment
from jddp.data.examples import Batch, Examples
from jddp.data.order import examples_at, random_bits
from jddp.errors import ConfigError, DataError


class TrainBatches:
    """An endless iterator over the batches of one process.

    Batch `s` holds positions `s * global_batch_size` onwards of the run (see `order`). Epochs
    follow each other without a gap: a batch may straddle two of them, no example is dropped, and
    no batch is short.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        global_batch_size: int,
        seed: int,
        shuffle: bool = True,
        augment: Augment | None = None,
        process_index: int = 0,
        num_processes: int = 1,
    ):
        """Starts at step 0.

        Args:
          examples: What to read.
          global_batch_size: Examples a step, over all processes.
          seed: Names the order and the augmentation; not negative.
          shuffle: Whether each epoch is a new permutation, or the order of the data.
          augment: Changes the rows of a batch at random, or `None`.
          process_index: Which part of each batch is this process's.
          num_processes: How many such parts there are.

        Raises:
          ConfigError: If the batch does not divide over the processes, or the seed is negative.
          DataError: If there are no examples.
        """
        if global_batch_size < 1 or global_batch_size % num_processes:
            raise ConfigError(
                f"global_batch_size {global_batch_size} does not divide over {num_processes} "
                f"processes. {_nearest_multiples(global_batch_size, num_processes)}"
            )
        if seed < 0:
            raise ConfigError(f"seed {seed} is negative. Take 0 or any larger whole number.")
        if len(examples) == 0:
            raise DataError("the training data holds 0 examples. At least one is needed.")
        self.num_examples = len(examples)
        self.global_batch_size = global_batch_size
        self._examples = examples
        self._seed = seed
        self._shuffle = shuffle
        self._augment = augment
        process_batch_size = global_batch_size // num_processes
        first_row = process_index * process_batch_size
        self._rows = slice(first_row, first_row + process_batch_size)
        self._step = 0

    @property
    def steps_per_epoch(self) -> float:
        """Steps that read as many examples as there are: whole only where the sizes divide."""
        return self.num_examples / self.global_batch_size

    def batch(self, step: int) -> Batch:
        """This process's rows of one step, whatever was read before."""
        first = step * self.global_batch_size
        positions = np.arange(first + self._rows.start, first + self._rows.stop)
        seed = self._seed if self._shuffle else None
        indices = examples_at(positions, num_examples=self.num_examples, seed=seed)
        batch = self._examples.take(indices)
        if self._augment is None:
            return batch
        # Choices are drawn for the whole global batch: a row's do not depend on who holds it.
        rng = np.random.Generator(random_bits("augment", self._seed, step))
        choices = self._augment.draw(rng, self.global_batch_size)
        return self._augment.apply(batch, {name: c[self._rows] for name, c in choices.items()})

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self.batch(self._step)
        self._step += 1
        return batch

    def get_state(self) -> dict[str, int]:
        """Says how many batches were delivered: all that is needed to go on from here."""
        return {"position": self._step}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes on as if `state["position"]` batches had been delivered."""
        self._step = int(state["position"])


@dataclass(frozen=True)
class _EvalBatches:
    """Can be iterated any number of times, from the beginning each time."""

    examples: Examples
    global_batch_size: int
    process_index: int
    num_processes: int

    def __len__(self) -> int:
        return -(-len(self.examples) // self.global_batch_size)

    def __iter__(self) -> Iterator[Batch]:
        begin = self.process_index * self.global_batch_size // self.num_processes
        end = (self.process_index + 1) * self.global_batch_size // self.num_processes
        for first in range(0, len(self.examples), self.global_batch_size):
            rows = np.arange(first + begin, first + end)
            yield self.examples.take(rows[rows < len(self.examples)])


def eval_batches(
    examples: Examples, *, global_batch_size: int, process_index: int = 0, num_processes: int = 1
) -> _EvalBatches:
    """Batches that hold each example exactly once, in order, over all processes together.

    Args:
      examples: What to read.
      global_batch_size: Examples a batch, over all processes.
      process_index: Which part of each batch is this process's.
      num_processes: How many such parts there are.

    Returns:
      An iterable with a length, the same on every process. The parts of the last batch may be
      short, and on some processes empty.

    Raises:
      ConfigError: If `global_batch_size` is not positive.
      DataError: If there are no examples.
    """
    if global_batch_size < 1:
        raise ConfigError(f"global_batch_size {global_batch_size} is not positive. Take 1 or more.")
    if len(examples) == 0:
        raise DataError("the evaluation data holds 0 examples. At least one is needed.")
    return _EvalBatches(examples, global_batch_size, process_index, num_processes)


def _nearest_multiples(size: int, factor: int) -> str:
    below = size // factor * factor
    if below <= 0:
        return f"Smallest that does: {factor}."
    return f"Nearest that do: {below} and {below + factor}."
