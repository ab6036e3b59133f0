"""Counts the epochs of a run by positions in its data."""

from jddp.trainer.prefetch import Source
from jddp.typing import JsonObject


class Epochs:
    """Epochs that end, one after the other.

    Args:
      source: The training batches, which know how many epochs end before a position.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._num_ended = 0

    def begin(self, position: JsonObject) -> None:
        """Begins at a position, such as that of a checkpoint."""
        self._num_ended = self._source.num_epochs(position)

    def ended_at(self, position: JsonObject) -> range:
        """The numbers, from 1, of the epochs that have ended since the last position."""
        first = self._num_ended + 1
        self.begin(position)
        return range(first, self._num_ended + 1)
