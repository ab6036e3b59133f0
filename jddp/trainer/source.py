"""Training batches one after the other, and where among them a run stands."""

import itertools
from collections.abc import Iterable
from typing import Any

from jddp.errors import DataError

PyTree = Any


class Source:
    """Batches, with or without a position of their own.

    Args:
      batches: Their iterator may have `get_state` and `set_state`, as grain's have; any other is
        counted, and read from its start again on resume.
    """

    def __init__(self, batches: Iterable[PyTree]) -> None:
        self._iterator: Any = iter(batches)
        self._num_taken = 0
        self._has_state = all(hasattr(self._iterator, x) for x in ("get_state", "set_state"))

    def peek(self) -> PyTree:
        """The first batch, which stays to be taken."""
        position = self.position()
        first = next(self)
        if self._has_state:
            self.move_to(position)
        else:
            self._iterator = itertools.chain([first], self._iterator)
            self._num_taken = 0
        return first

    def __next__(self) -> PyTree:
        """The next batch.

        Raises:
          DataError: If there is none.
        """
        batch = next(self._iterator, None)
        if batch is None:
            raise DataError(
                f"The training batches ended after {self._num_taken}. Give an endless iterator, "
                "or fewer steps."
            )
        self._num_taken += 1
        return batch

    def position(self) -> dict[str, Any]:
        """Where it stands, for a checkpoint."""
        own = {"state": self._iterator.get_state()} if self._has_state else {}
        return {"num_taken": self._num_taken, **own}

    def move_to(self, position: dict[str, Any]) -> None:
        """Goes where it stood; batches without a state are read up to there."""
        if self._has_state and "state" in position:
            self._iterator.set_state(position["state"])
            self._num_taken = position["num_taken"]
        while self._num_taken < position["num_taken"]:
            next(self)
