"""Long sequences of tokens, in memory or memory-mapped, and the weights of their documents."""

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


class DocumentWeights:
    """How much the tokens of each document of a sequence count in the loss."""

    def __init__(self, begins: np.ndarray, weights: np.ndarray) -> None:
        """Checks the weights.

        Args:
          begins: Positions at which documents begin, `(n,)`, in rising order from 0 on.
          weights: Their weights, `(n,)`.

        Raises:
          DataError: If there is not one weight per document, or one is negative or not finite.
        """
        is_right = np.isfinite(weights) & (weights >= 0)
        if weights.shape != begins.shape or not is_right.all():
            raise DataError(
                f"{file_of(weights)}weights of {len(begins):,} documents are "
                f"{weights.dtype}{weights.shape}. Each document needs one, finite and not negative."
            )
        self._begins = begins
        self._weights = weights

    def at(self, places: np.ndarray) -> np.ndarray:
        """The weights of the documents at these places, in the shape of the places."""
        return self._weights[np.searchsorted(self._begins, places, side="right") - 1]


def file_of(tokens: np.ndarray) -> str:
    """The file of a sequence, to begin a sentence with; empty if it has none."""
    name = getattr(tokens, "filename", None)
    return "" if name is None else f"{name}: "
