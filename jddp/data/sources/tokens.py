"""Windows of long token sequences, to predict each token from the tokens before it.

    python -m jddp.data tokenize data/tokens book1.txt book2.txt     writes these files

A directory holds train.npy and test.npy, or several files of each (train-00000.npy, ...). Each file
is one row of uint16 or uint32, memory-mapped. train-00000.documents.npy has the positions at which
its documents begin; tokens.json has the tokenizer and the sizes, in tokens and in bytes.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jddp.data.examples import Examples, NumpyBatch
from jddp.data.source import DataSet, DataSource, Spec, make_data_set
from jddp.data.sources.mapped import map_npy, refusing_damage, require_file
from jddp.data.sources.packed_tokens import PackedExamples
from jddp.data.sources.token_shards import TokenShards, file_of
from jddp.errors import ConfigError, DataError
from jddp.typing import JsonObject

INDEX = "tokens.json"
DOCUMENTS = ".documents.npy"

# Arrays of a batch beside "tokens", by what becomes of documents.
ADDED: dict[str, dict[str, str]] = {
    "cross": {},
    "mask": {"mask": "float32"},
    "pack": {"segments": "int32", "mask": "float32"},
}


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
        self._tokens = TokenShards(shards, vocab_size)
        self._documents = documents
        self._sequence_length = sequence_length
        sizes = [max(0, len(tokens) - 1) // sequence_length for tokens in shards]
        self._ends = np.cumsum(sizes)
        if not sum(sizes):
            longest = max(shards, key=len)
            raise DataError(
                f"{file_of(longest)}{len(longest):,} tokens are too few for sequence_length "
                f"{sequence_length}, which needs {sequence_length + 1:,}. Give more text or "
                "shorter sequences."
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, indices: np.ndarray) -> NumpyBatch:
        """int32 tokens `(b, t + 1)`: inputs are all but the last, targets all but the first.

        Returns:
          "tokens"; and float32 "mask" `(b, t)` if documents are known.

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
            batch["tokens"][rows] = self._tokens.read(shard, places)
            if self._documents is not None:
                batch["mask"][rows] = ~_are_in(places[:, 1:], self._documents[shard])
        return batch


def tokens(
    *,
    directory: Path,
    sequence_length: int,
    vocab_size: int | None = None,
    documents: str = "cross",
) -> DataSource:
    """The source of tokens in a directory.

    Args:
      directory: Folder of the shards.
      sequence_length: Tokens that are predicted per example.
      vocab_size: Number of tokens; larger ones are refused. By default from tokens.json.
      documents: What becomes of documents: "cross", "mask" or "pack" (see `token_examples`).

    Raises:
      ConfigError: If an argument breaks its rule.
      DataError: If tokens.json is damaged.
    """
    spec = token_spec(sequence_length, documents)
    tokenizer, known_size, bytes_per_token = _known_in(directory / INDEX)
    vocab_size = vocab_size or known_size

    def examples(part: str) -> Examples:
        paths = _shards(directory, part)
        begins = [_begins(path) for path in paths if documents != "cross"]
        return token_examples(
            [*map(map_npy, paths)],
            begins,
            documents,
            sequence_length=sequence_length,
            vocab_size=vocab_size,
        )

    def load() -> DataSet:
        train, test = examples("train"), examples("test")
        return make_data_set(f"tokens {directory}{packing_of(train)}", train, test)

    sizes = {"vocab_size": vocab_size} if vocab_size else {}
    return DataSource(spec, load, sizes=sizes, tokenizer=tokenizer, bytes_per_token=bytes_per_token)


def _known_in(index: Path) -> tuple[str, int | None, float | None]:
    """Name and size of the tokenizer, and bytes of a token; of an index that may be absent."""
    if not index.exists():
        return "", None, None
    require_file(index)
    with refusing_damage(index, "index"):
        found = json.loads(index.read_text())
        return str(found.get("tokenizer", "")), int(found["vocab_size"]), _bytes_per_token(found)


def _bytes_per_token(index: JsonObject) -> float | None:
    """The mean over the test part; None if the index has no bytes, as of an earlier version."""
    num_bytes = index.get("bytes", {}).get("test")
    return num_bytes / index["tokens"]["test"] if num_bytes else None


def token_examples(
    shards: Sequence[np.ndarray],
    begins: Sequence[np.ndarray],
    documents: str,
    *,
    sequence_length: int,
    vocab_size: int | None = None,
) -> Examples:
    """Examples of sequences of tokens.

    Args:
      shards: Sequences of tokens.
      begins: Positions at which documents begin in each of them.
      documents: "cross" for windows of the sequences; "mask" for the same windows, in which first
        tokens of documents are not predicted; "pack" for rows of whole documents.
      sequence_length: Tokens that are predicted per example.
      vocab_size: Number of tokens; None accepts any.

    Raises:
      DataError: If the sequences hold nothing to predict.
    """
    make: Callable[..., Examples] = TokenExamples
    known = begins if documents == "mask" else None
    if documents == "pack":
        make, known = PackedExamples, begins
    return make(*shards, documents=known, sequence_length=sequence_length, vocab_size=vocab_size)


def packing_of(examples: Examples) -> str:
    """Words on the packing of documents, to describe data with; empty for windows."""
    if isinstance(examples, PackedExamples):
        return f", packed with {100 * examples.padding:.2g} % padding"
    return ""


def token_spec(sequence_length: int, documents: str) -> Spec:
    """The spec of such examples; refuses a length that predicts nothing, and unknown words."""
    if sequence_length < 1:
        raise ConfigError(f"sequence_length {sequence_length} is not positive. Choose 1 or more.")
    if documents not in ADDED:
        raise ConfigError(f"data.kwargs.documents: {documents!r} is none of {', '.join(ADDED)}.")
    spec = {"tokens": ((sequence_length + 1,), np.dtype("int32"))}
    return spec | {name: ((sequence_length,), np.dtype(x)) for name, x in ADDED[documents].items()}


def _shards(root: Path, part: str) -> list[Path]:
    paths = [path for path in root.glob(f"{part}-*.npy") if not path.name.endswith(DOCUMENTS)]
    return sorted(paths) or [root / f"{part}.npy"]


def _begins(shard: Path) -> np.ndarray:
    return map_npy(shard.with_name(shard.stem + DOCUMENTS))


def _are_in(places: np.ndarray, rising: np.ndarray) -> np.ndarray:
    found = np.searchsorted(rising, places)
    return rising[np.minimum(found, len(rising) - 1)] == places if len(rising) else found < 0
