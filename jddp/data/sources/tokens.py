"""Windows of long token sequences, to predict each token from the tokens before it.

    python -m jddp.data tokenize data/tokens book1.txt book2.txt     writes these files

A directory holds train.npy and test.npy, or several files of each (train-00000.npy, ...). Each file
is one row of uint16 or uint32, memory-mapped. Beside it, train-00000.documents.npy has the
positions at which documents begin; tokens.json has the tokenizer and the sizes.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jddp.data.examples import NumpyBatch
from jddp.data.source import DataSource, Spec, make_data_set
from jddp.data.sources.mapped import map_npy, refusing_damage, require_file
from jddp.errors import ConfigError, DataError

INDEX = "tokens.json"
DOCUMENTS = ".documents.npy"


class TokenExamples:
    """Windows of long sequences: each token but a sequence's first is predicted once per epoch."""

    def __init__(
        self,
        *shards: np.ndarray,
        sequence_length: int,
        vocab_size: int | None = None,
        documents: Sequence[np.ndarray] | None = None,
    ):
        """Cuts sequences into windows that overlap by one token; the remainder is not used.

        Args:
          shards: Sequences `(n,)` of whole numbers, in memory or memory-mapped.
          sequence_length: Predictions per example, `t`; a window holds `t + 1` tokens.
          vocab_size: Number of tokens; larger ones are refused when read. None accepts any from 0.
          documents: Positions at which documents begin in each sequence, in rising order. First
            tokens of documents are then not predicted: "mask" is 0 there.

        Raises:
          DataError: If no sequence is long enough for a window, or one is not a row of integers.
        """
        for tokens in shards:
            if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
                raise DataError(
                    f"{_name(tokens)}tokens are {tokens.dtype}{tokens.shape}. They need one row of "
                    "whole numbers."
                )
        self._shards = shards
        self._documents = documents
        self._sequence_length = sequence_length
        self._vocab_size = vocab_size
        sizes = [max(0, len(tokens) - 1) // sequence_length for tokens in shards]
        self._ends = np.cumsum(sizes)
        if not sum(sizes):
            longest = max(shards, key=len)
            raise DataError(
                f"{_name(longest)}{len(longest):,} tokens are too few for sequence_length "
                f"{sequence_length}, which needs {sequence_length + 1:,}. Give more text or "
                "shorter sequences."
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, indices: np.ndarray) -> NumpyBatch:
        """int32 tokens `(b, t + 1)`: inputs are all but the last, targets all but the first.

        Returns:
          "tokens", and float32 "mask" `(b, t)` if documents are known.

        Raises:
          DataError: If a token is negative, or not below `vocab_size`.
        """
        length = self._sequence_length
        batch = {"tokens": np.empty((len(indices), length + 1), np.int32)}
        if self._documents is not None:
            batch["mask"] = np.ones((len(indices), length), np.float32)
        shards = np.searchsorted(self._ends, indices, side="right")
        for shard in np.unique(shards):
            rows = np.flatnonzero(shards == shard)
            firsts = (indices[rows] - (self._ends[shard - 1] if shard else 0)) * length
            places = firsts[:, None] + np.arange(length + 1)
            batch["tokens"][rows] = self._read(self._shards[shard], places)
            if self._documents is not None:
                batch["mask"][rows] = ~_are_in(places[:, 1:], self._documents[shard])
        return batch

    def _read(self, tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
        taken = tokens[places]
        size = self._vocab_size or 2**31  # as they become int32
        if (is_wrong := (taken < 0) | (taken >= size)).any():
            place = places[is_wrong][0]
            raise DataError(
                f"{_name(tokens)}token {tokens[place]} at {place:,} is not in 0 ... "
                f"{size - 1}. Raise vocab_size, or use tokens of the right tokenizer."
            )
        return taken


def tokens(
    *,
    directory: Path,
    sequence_length: int,
    vocab_size: int | None = None,
    cross_documents: bool = True,
) -> DataSource:
    """The source of tokens in a directory.

    Args:
      directory: Folder of the shards.
      sequence_length: Tokens that are predicted per example.
      vocab_size: Number of tokens; larger ones are refused. By default from tokens.json.
      cross_documents: Whether a document's first token is predicted from the previous document.

    Raises:
      ConfigError: If an argument breaks its rule.
      DataError: If tokens.json is damaged.
    """
    spec = token_spec(sequence_length)
    if vocab_size is None and (directory / INDEX).exists():
        require_file(directory / INDEX)
        with refusing_damage(directory / INDEX, "index"):
            vocab_size = int(json.loads((directory / INDEX).read_text())["vocab_size"])
    if not cross_documents:
        spec["mask"] = ((sequence_length,), np.dtype("float32"))

    make = functools.partial(TokenExamples, sequence_length=sequence_length, vocab_size=vocab_size)

    def examples(part: str) -> TokenExamples:
        paths = _shards(directory, part)
        begin = (path.with_name(path.stem + DOCUMENTS) for path in paths)
        documents = None if cross_documents else [*map(map_npy, begin)]
        return make(*map(map_npy, paths), documents=documents)

    return DataSource(
        spec=spec,
        load=lambda: make_data_set(f"tokens {directory}", examples("train"), examples("test")),
        sizes={"vocab_size": vocab_size} if vocab_size else {},
    )


def token_spec(sequence_length: int) -> Spec:
    """The spec of windows of this length; refuses a length that predicts nothing."""
    if sequence_length < 1:
        raise ConfigError(f"sequence_length {sequence_length} is not positive. Choose 1 or more.")
    return {"tokens": ((sequence_length + 1,), np.dtype("int32"))}


def _shards(root: Path, part: str) -> list[Path]:
    paths = [p for p in root.glob(f"{part}-*.npy") if not p.name.endswith(DOCUMENTS)]
    return sorted(paths) or [root / f"{part}.npy"]


def _name(tokens: np.ndarray) -> str:
    name = getattr(tokens, "filename", None)
    return "" if name is None else f"{name}: "


def _are_in(places: np.ndarray, rising: np.ndarray) -> np.ndarray:
    found = np.searchsorted(rising, places)
    return rising[np.minimum(found, len(rising) - 1)] == places if len(rising) else found < 0
