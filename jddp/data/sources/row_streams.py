"""Batches of rows that are read one after the other, as of an `IterableDataset` of Hugging Face.

    for batch in EndlessBatches(rows, cut):       # of one epoch after the other
        ...                                       # the rows of this process, a dict of arrays

Global batches are consecutive rows, of which each process takes its part: they, and the position
after them, are the same for any number of processes.
"""

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jddp.data.examples import NumpyBatch
from jddp.data.row_examples import RowExamples
from jddp.data.shares import Share
from jddp.data.sources.decoded_rows import Images, Row, stored_rows
from jddp.data.sources.mapped import refusing_damage
from jddp.errors import DataError
from jddp.typing import JsonObject


@dataclass(frozen=True)
class Cut:
    """How rows become batches of a process.

    Attributes:
      images: Columns that are decoded here.
      global_batch_size: Rows of a global batch.
      share: Part of each global batch that this process takes.
    """

    images: Images
    global_batch_size: int
    share: Share

    def next_batch(self, rows: Iterator[Row]) -> NumpyBatch | None:
        """This process's part of the next rows; None if there are no more.

        Raises:
          DataError: If a row cannot be read, or rows differ.
        """
        index, num_processes = self.share
        with refusing_damage(self.images.where, "stream of rows"):
            together = list(itertools.islice(rows, self.global_batch_size))
        if not together:
            return None
        begin = index * self.global_batch_size // num_processes
        end = (index + 1) * self.global_batch_size // num_processes
        own = together[begin:end]
        decoded = [self.images.decoded(row) for row in own or together[:1]]  # for the dtypes
        return RowExamples(decoded).take(np.arange(len(own)))


def cut_rows(rows: Any, where: str, global_batch_size: int, share: Share) -> tuple[Any, Cut]:
    """Rows as arrays, and how they become batches.

    Args:
      rows: An `IterableDataset`.
      where: Name of the rows, for errors.
      global_batch_size: Rows of a global batch.
      share: Part of each global batch that this process takes.

    Raises:
      DataError: If a column would be decoded, and holds no images.
    """
    stored, images = stored_rows(rows, where)
    return stored, Cut(images, global_batch_size, share)


@dataclass(frozen=True)
class OnePass:
    """Batches of each row once, in order; the last one may be smaller."""

    rows: Any
    cut: Cut

    def __iter__(self) -> Iterator[NumpyBatch]:
        rows = iter(self.rows)
        while (batch := self.cut.next_batch(rows)) is not None:
            yield batch


class EndlessBatches:
    """Full batches, of one epoch after the other; a batch may hold rows of two of them.

    Args:
      rows: An `IterableDataset`, which knows its position and its epoch.
      cut: How rows become batches.

    Attributes:
      resumes_exactly: Whether a position is that of the next row.
    """

    resumes_exactly = True

    def __init__(self, rows: Any, cut: Cut) -> None:
        self._rows, self._cut = rows, cut
        self._epoch = 0

    def __iter__(self) -> Iterator[NumpyBatch]:
        rows = self._without_end()
        while (batch := self._cut.next_batch(rows)) is not None:
            yield batch

    def _without_end(self) -> Iterator[Row]:
        begins_at = self._epoch
        for self._epoch in itertools.count(begins_at):
            is_empty = True
            for row in self._rows:
                is_empty = False
                yield row
            if is_empty and self._epoch > begins_at:
                raise DataError(f"{self._cut.images.where}: no rows. At least one is needed.")
            self._rows.load_state_dict({})  # else each pass would begin where this one did
            # By the number of the epoch `datasets` would shuffle the files; 0 keeps their order.
            self._rows.set_epoch(0 if self.resumes_exactly else self._epoch + 1)

    def state_dict(self) -> JsonObject:
        """The position after the last batch."""
        return {"epoch": self._epoch, "rows": self._rows.state_dict()}

    def load_state_dict(self, state: JsonObject) -> None:
        """Moves to a position, for the next iterator."""
        self._epoch = state["epoch"]
        self._rows.load_state_dict(state["rows"])
        self._rows.set_epoch(state["rows"]["epoch"])


class ShuffledBatches(EndlessBatches):
    """Batches of rows in a random order, which do not resume exactly: rows wait in a buffer.

    Each process reads rows of its own. A position is of one division of the rows: with another
    number of processes the next epoch begins.

    Args:
      rows: The rows of this process, an `IterableDataset`.
      cut: How rows become batches.
      num_processes: Number of processes among which the rows are divided.
    """

    resumes_exactly = False
    _is_reported = False

    def __init__(self, rows: Any, cut: Cut, num_processes: int) -> None:
        super().__init__(rows, cut)
        self._num_processes = num_processes

    def __iter__(self) -> Iterator[NumpyBatch]:
        if not self._is_reported:
            logging.getLogger("jddp").warning(
                "%s is shuffled in a buffer, whose rows are left out when a run resumes: it does "
                "not resume exactly.",
                self._cut.images.where,
            )
        self._is_reported = True
        return super().__iter__()

    def state_dict(self) -> JsonObject:
        """The position after the last batch, and the division of the rows."""
        return {**super().state_dict(), "num_processes": self._num_processes}

    def load_state_dict(self, state: JsonObject) -> None:
        """Moves to a position, or to the next epoch if it is of another number of processes."""
        if state["num_processes"] == self._num_processes:
            super().load_state_dict(state)
            return
        self._epoch = state["epoch"] + 1
        self._rows.set_epoch(self._epoch)
        logging.getLogger("jddp").warning(
            "%s was read by %d processes and now is by %d, which divide its rows in another way: "
            "it begins with the next epoch.",
            self._cut.images.where,
            state["num_processes"],
            self._num_processes,
        )
