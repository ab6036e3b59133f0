"""Long sequences of tokens, in memory or memory-mapped."""

from collections.abc import Sequence

import numpy as np

from jddp.errors import DataError


class TokenShards:
    """Sequences of tokens, of which any place can be read."""

    def __init__(self, shards: Sequence[np.ndarray], vocab_size: int | None) -> None:
        """Checks the sequences; reads no token.

        Args:
          shards: Sequences `(n,)` of whole numbers.
          vocab_size: Number of tokens; larger ones are refused when read. None accepts any from 0.

        Raises:
          DataError: If one is not a row of integers.
        """
        for tokens in shards:
            if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
                raise DataError(
                    f"{file_of(tokens)}tokens are {tokens.dtype}{tokens.shape}. They need one row "
                    "of whole numbers."
                )
        self._shards = shards
        self._vocab_size = vocab_size or 2**31  # as they become int32

    def read(self, shard: int, places: np.ndarray) -> np.ndarray:
        """The tokens at these places of a sequence, in the shape of the places.

        Raises:
          DataError: If a token is negative, or not below `vocab_size`.
        """
        tokens = self._shards[shard]
        taken = tokens[places]
        if (is_wrong := (taken < 0) | (taken >= self._vocab_size)).any():
            place = places[is_wrong][0]
            raise DataError(
                f"{file_of(tokens)}token {tokens[place]} at {place:,} is not in 0 ... "
                f"{self._vocab_size - 1}. Raise vocab_size, or use tokens of the right tokenizer."
            )
        return taken


def file_of(tokens: np.ndarray) -> str:
    """The file of a sequence, to begin a sentence with; empty if it has none."""
    name = getattr(tokens, "filename", None)
    return "" if name is None else f"{name}: "
