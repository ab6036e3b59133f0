"""Whole documents of tokens, packed into rows: attention need not cross from one to another.

    examples = PackedExamples(tokens, documents=[begins], sequence_length=1024)
    examples.padding                # share of the rows that holds no document

A document that is longer than a row is cut into pieces. A piece begins with the last token of the
piece before it, so each token but a document's first is predicted once per epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jddp.data.examples import NumpyBatch
from jddp.data.packing import pack_items
from jddp.data.sources.token_shards import TokenShards, file_of
from jddp.errors import DataError


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Parts of documents: consecutive tokens.

    Attributes:
      shards: Sequence of each piece, `(n,)`.
      begins: Place of its first token in the sequence, `(n,)`.
      sizes: Number of its tokens, `(n,)`.
    """

    shards: np.ndarray
    begins: np.ndarray
    sizes: np.ndarray

    def __getitem__(self, chosen: np.ndarray) -> "_Pieces":
        return _Pieces(self.shards[chosen], self.begins[chosen], self.sizes[chosen])


class PackedExamples:
    """Rows of whole documents, each as long as `sequence_length` predictions and one token."""

    def __init__(
        self,
        *shards: np.ndarray,
        documents: Sequence[np.ndarray],
        sequence_length: int,
        vocab_size: int | None = None,
    ):
        """Packs documents into rows; reads no token. Documents of one token are left out.

        Args:
          shards: Sequences `(n,)` of whole numbers, in memory or memory-mapped.
          documents: Positions at which documents begin in each sequence, in rising order.
          sequence_length: Predictions per example, `t`.
          vocab_size: Number of tokens; larger ones are refused when read. None accepts any from 0.

        Raises:
          DataError: If a sequence is not a row of integers, positions do not rise within their
            sequence, or no document has two tokens.
        """
        self._tokens = TokenShards(shards, vocab_size)
        self._row_length = sequence_length + 1
        pairs = enumerate(zip(shards, documents, strict=True))
        cut = [_cut(i, tokens, begins, sequence_length) for i, (tokens, begins) in pairs]
        pieces = _Pieces(*map(np.concatenate, zip(*cut, strict=True)))
        if not len(pieces.sizes):
            raise DataError("no document has two tokens. Give more text.")
        rows = pack_items(pieces.sizes, self._row_length)
        self._pieces = pieces[np.argsort(rows, kind="stable")]
        self._ends = np.cumsum(np.bincount(rows))

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def padding(self) -> float:
        """Share of the rows' places that hold no token of a document."""
        return 1 - int(self._pieces.sizes.sum()) / (len(self) * self._row_length)

    def take(self, indices: np.ndarray) -> NumpyBatch:
        """int32 tokens `(b, t + 1)`: inputs are all but the last, targets all but the first.

        Returns:
          "tokens"; int32 "segments" `(b, t)`, the number of each input's document in its row, from
          1 on, and 0 for padding; and float32 "mask" `(b, t)`, 1 for a target in its input's
          document.

        Raises:
          DataError: If a token is negative, or not below `vocab_size`.
        """
        first = np.where(indices > 0, self._ends[indices - 1], 0)
        counts = self._ends[indices] - first
        pieces = self._pieces[_ranges(first, counts)]
        places = self._places(pieces.sizes, counts)
        numbers = np.repeat(_ranges(np.ones_like(counts), counts), pieces.sizes)
        segments = self._laid_out(numbers.astype(np.int32), places, len(indices))
        tokens = self._read(pieces)
        is_inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        return {
            "tokens": self._laid_out(tokens, places, len(indices)),
            "segments": segments[:, :-1],
            "mask": is_inside.astype(np.float32),
        }

    def _places(self, sizes: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The place in a batch of each token of pieces, of which each row has the next `counts`."""
        begins = np.cumsum(sizes) - sizes
        begins -= np.repeat(begins[np.cumsum(counts) - counts], counts)
        rows = np.repeat(np.arange(len(counts)), counts)
        return _ranges(rows * self._row_length + begins, sizes)

    def _laid_out(self, values: np.ndarray, places: np.ndarray, num_rows: int) -> np.ndarray:
        """Rows with these values at these places, and zeros elsewhere."""
        rows = np.zeros((num_rows, self._row_length), values.dtype)
        rows.reshape(-1)[places] = values
        return rows

    def _read(self, pieces: _Pieces) -> np.ndarray:
        """The tokens of pieces, one after the other."""
        tokens = np.empty(pieces.sizes.sum(), np.int32)
        for shard in np.unique(pieces.shards):
            is_here = pieces.shards == shard
            here = pieces[is_here]
            places = _ranges(here.begins, here.sizes)
            tokens[np.repeat(is_here, pieces.sizes)] = self._tokens.read(shard, places)
        return tokens


def _cut(
    shard: int, tokens: np.ndarray, begins: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pieces of a sequence's documents, each of `length` predictions or fewer."""
    edges = np.append(begins, len(tokens)).astype(np.int64)
    sizes = np.diff(edges)
    if edges[0] != 0 or (sizes < 0).any():
        raise DataError(
            f"{file_of(tokens)}the positions of documents do not rise from 0 to {len(tokens):,}, "
            "the number of tokens. Write them again."
        )
    num_predicted = np.maximum(sizes - 1, 0)
    counts = -(-num_predicted // length)
    offsets = _ranges(np.zeros_like(counts), counts) * length
    left = np.repeat(num_predicted, counts) - offsets
    firsts = np.repeat(edges[:-1], counts) + offsets
    return np.full(len(firsts), shard), firsts, np.minimum(left, length) + 1


def _ranges(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """`begin ... begin + size - 1` for each pair, one after the other."""
    ends = np.cumsum(sizes)
    return np.repeat(begins - (ends - sizes), sizes) + np.arange(ends[-1] if len(ends) else 0)
