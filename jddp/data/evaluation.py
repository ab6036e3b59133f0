"""Evaluation batches of one process; all processes together have each example exactly once.

    for batch in eval_batches(examples, global_batch_size=1000):
        ...                            # the rows of this process, a dict of numpy arrays

They can be iterated any number of times. Each process takes an equal part of every batch
(`Share`), and all processes take the same number of batches. The last one may be smaller.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jddp.data.batches import Share
from jddp.data.examples import Examples, Subset, as_examples
from jddp.data.order import Order
from jddp.data.transforms import Chain, Transform, chain_of
from jddp.errors import ConfigError, DataError
from jddp.names import refuses_unknown
from jddp.names.synonyms import OF_EVAL_BATCHES
from jddp.typing import TRANSFORM, Batch, Shown, TextTable


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
        # At random: rows that take turns, such as classes, would else be of one kind.
        shares = Order(num_rows, seed, shuffle=False).uniform(np.arange(num_rows), 1)[:, 0]
        rows = sections[:-1] + (shares * np.diff(sections)).astype(np.int64)
        return replace(self, examples=Subset(self.examples, rows))

    def __repr__(self) -> str:
        return f"evaluation batches: {len(self.examples):,} examples in {len(self):,} batches"

    def _tables(self) -> Iterator[TextTable]:
        facts = self.settings | {"num_batches": len(self)}
        rows = [(name.replace("_", " "), f"{x}") for name, x in facts.items()]
        yield TextTable("evaluation batches", rows)

    def __len__(self) -> int:
        return -(-len(self.examples) // self.global_batch_size)

    def __iter__(self) -> Iterator[Batch]:
        begin, end = self.share.part_of(self.global_batch_size)
        for first in range(0, len(self.examples), self.global_batch_size):
            last = min(first + end, len(self.examples))
            rows = self.examples.take(np.arange(first + begin, last))
            is_sent = self.on_device and self.chain.transforms
            yield rows | {TRANSFORM: self.chain} if is_sent else self.chain(rows)


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
      transforms: Transforms of rows; those that use random numbers are left out.
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
