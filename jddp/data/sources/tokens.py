"""Examples of tokens: windows of long sequences, or rows of whole documents.

    jddp data tokenize data/tokens book1.txt book2.txt     writes these files

A directory holds train.npy and test.npy, or several files of each (train-00000.npy, ...). Each file
is one row of uint16 or uint32, memory-mapped. train-00000.documents.npy has the positions at which
its documents begin; tokens.json has the tokenizer and the sizes, in tokens and in bytes.

A text that is on every machine is the library of the running Python, about 11 MB of source files. A
hash of a file's name puts about one in ten into the test split, so that adding or removing a file
moves no other. The text depends on the version of Python: its hash is in the log.
"""

import json
import os
import sysconfig
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from jddp.data.examples import Examples, NumpyBatch
from jddp.data.packing import pack_items
from jddp.data.source import DataSet, DataSource, Spec, make_data_set
from jddp.data.sources.arrays import map_npy, refusing_damage
from jddp.ground.errors import ConfigError, DataError
from jddp.ground.typing import JsonObject

INDEX = "tokens.json"
DOCUMENTS = ".documents.npy"

# Arrays of a batch besides "tokens", by the treatment of documents.
ADDED: dict[str, dict[str, str]] = {"cross": {}, "pack": {"segments": "int32", "mask": "float32"}}

# Tests, installed packages, a whole editor: neither typical nor on every machine.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib"}
_MACHINE_MADE = ("_sysconfigdata", "config-")  # written when this interpreter was built


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
      documents: Treatment of documents: "cross" or "pack" (see `token_examples`).

    Raises:
      ConfigError: If an argument breaks its rule.
      DataError: If tokens.json is damaged.
    """
    spec = token_spec(sequence_length, documents)
    facts: JsonObject = {}
    if (index := directory / INDEX).exists():
        with refusing_damage(index, "index"):
            facts = json.loads(index.read_text())
            vocab_size = vocab_size or int(facts["vocab_size"])
    num_bytes = facts.get("bytes", {}).get("test")  # Earlier versions wrote none.

    def examples(part: str) -> Examples:
        found = [x for x in directory.glob(f"{part}-*.npy") if not x.name.endswith(DOCUMENTS)]
        paths = sorted(found) or [directory / f"{part}.npy"]
        begins = [x.with_name(x.stem + DOCUMENTS) for x in paths if documents != "cross"]
        shards = [*map(map_npy, paths)]
        return token_examples(
            shards, [*map(map_npy, begins)], documents, sequence_length, vocab_size
        )

    def load() -> DataSet:
        train, test = examples("train"), examples("test")
        return make_data_set(f"tokens {directory}{packing_of(train)}", train, test)

    return DataSource(
        spec,
        load,
        sizes={"vocab_size": vocab_size} if vocab_size else {},
        tokenizer=str(facts.get("tokenizer", "")),
        bytes_per_token=num_bytes / facts["tokens"]["test"] if num_bytes else None,
    )


def python_stdlib(*, sequence_length: int = 256, documents: str = "cross") -> DataSource:
    """The source of the standard library's text.

    Args:
      sequence_length: Bytes that are predicted per example.
      documents: Treatment of documents, each a file: "cross" or "pack" (see `tokens`).

    Raises:
      ConfigError: If an argument breaks its rule.
    """
    spec = token_spec(sequence_length, documents)
    root = Path(sysconfig.get_path("stdlib"))

    def load() -> DataSet:
        parts: tuple[list[bytes], list[bytes]] = [], []
        for path in source_files(root):
            is_test = sha256(path.as_posix().encode()).digest()[0] % 10 == 0
            parts[is_test].append((root / path).read_bytes() + b"\0")
        digest = sha256(b"".join(parts[0] + parts[1])).hexdigest()

        def examples(texts: list[bytes]) -> Examples:
            text = np.frombuffer(b"".join(texts), np.uint8)
            begins = np.cumsum([0, *map(len, texts)])[:-1]
            return token_examples([text], [begins], documents, sequence_length)

        train, test = map(examples, parts)
        name = f"Python's standard library{packing_of(train)}, sha256 {digest[:12]}"
        return make_data_set(name, train, test, sha256_hex=digest)

    return DataSource(spec, load, sizes={"vocab_size": 256}, bytes_per_token=1.0)


def source_files(root: Path) -> list[Path]:
    """The source files under `root` that count as text: relative paths, in a fixed order."""
    files = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if _is_text(name)]
        here = Path(directory).relative_to(root)
        files += [here / name for name in names if name.endswith(".py") and _is_text(name)]
    return sorted(files, key=Path.as_posix)


def _is_text(name: str) -> bool:
    return name not in _SKIPPED and not name.startswith(_MACHINE_MADE)


def token_spec(sequence_length: int, documents: str) -> Spec:
    """The spec of such examples; refuses a length that predicts nothing, and unknown words."""
    if sequence_length < 1:
        raise ConfigError(f"sequence_length {sequence_length} is not positive. Choose 1 or more.")
    if documents not in ADDED:
        raise ConfigError(f"data.kwargs.documents: {documents!r} is none of {', '.join(ADDED)}.")
    spec = {"tokens": ((sequence_length + 1,), np.dtype("int32"))}
    return spec | {name: ((sequence_length,), np.dtype(x)) for name, x in ADDED[documents].items()}


def token_examples(
    shards: Sequence[np.ndarray],
    begins: Sequence[np.ndarray],
    documents: str,
    sequence_length: int,
    vocab_size: int | None = None,
) -> Examples:
    """Examples of sequences of tokens.

    Args:
      shards: Sequences of tokens.
      begins: Positions at which documents begin in each of them.
      documents: "cross" for windows of the sequences; "pack" for rows of whole documents.
      sequence_length: Tokens that are predicted per example.
      vocab_size: Number of tokens; None accepts any.

    Raises:
      DataError: If the sequences hold nothing to predict, or are no rows of whole numbers.
    """
    for tokens in shards:
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(
                f"{_file_of(tokens)}tokens are {tokens.dtype}{tokens.shape}. They need one row of "
                "whole numbers."
            )
    if documents == "pack":
        return PackedExamples(
            *shards, documents=begins, sequence_length=sequence_length, vocab_size=vocab_size
        )
    return TokenExamples(*shards, sequence_length=sequence_length, vocab_size=vocab_size)


def packing_of(examples: Examples) -> str:
    """Words on the packing of documents, to describe data with; empty for windows."""
    if isinstance(examples, PackedExamples):
        return f", packed with {100 * examples.padding:.2g} % padding"
    return ""


def _tokens_at(tokens: np.ndarray, places: np.ndarray, vocab_size: int | None) -> np.ndarray:
    """The tokens at these places of a sequence, in the shape of the places.

    Raises:
      DataError: If a token is negative, not below `vocab_size`, or needs more than 32 bits.
    """
    taken = tokens[places]
    end = vocab_size or 2**31  # Tokens become int32.
    if (is_wrong := (taken < 0) | (taken >= end)).any():
        place = places[is_wrong][0]
        raise DataError(
            f"{_file_of(tokens)}token {tokens[place]} at {place:,} is not in 0 ... {end - 1}. "
            "Raise vocab_size, or use tokens of the right tokenizer."
        )
    return taken


def _file_of(tokens: np.ndarray) -> str:
    """The file of a sequence, to begin a sentence with; empty if it has none."""
    name = getattr(tokens, "filename", None)
    return "" if name is None else f"{name}: "


class TokenExamples:
    """Windows of long sequences: each token but a sequence's first is predicted once per epoch."""

    def __init__(self, *shards: np.ndarray, sequence_length: int, vocab_size: int | None = None):
        """Cuts sequences into windows that overlap by one token; the remainder is not used.

        Args:
          shards: Sequences `(n,)` of whole numbers, in memory or memory-mapped.
          sequence_length: Predictions per example, `t`; a window holds `t + 1` tokens.
          vocab_size: Number of tokens; larger ones are refused when read. None accepts any from 0.

        Raises:
          DataError: If no sequence is long enough for a window.
        """
        self._shards, self._vocab_size = shards, vocab_size
        self._sequence_length = sequence_length
        sizes = [max(0, len(tokens) - 1) // sequence_length for tokens in shards]
        self._ends = np.cumsum(sizes)
        if not sum(sizes):
            raise DataError(
                f"{_file_of(shards[0])}{max(map(len, shards)):,} tokens are too few for "
                f"sequence_length {sequence_length}, which needs {sequence_length + 1:,}."
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, indices: np.ndarray) -> NumpyBatch:
        """int32 tokens `(b, t + 1)`: inputs are all but the last, targets all but the first.

        Raises:
          DataError: If a token is negative, or not below `vocab_size`.
        """
        length = self._sequence_length
        tokens = np.empty((len(indices), length + 1), np.int32)
        shards = np.searchsorted(self._ends, indices, side="right")
        for shard in np.unique(shards):
            rows = np.flatnonzero(shards == shard)
            firsts = (indices[rows] - (self._ends[shard - 1] if shard else 0)) * length
            places = firsts[:, None] + np.arange(length + 1)
            tokens[rows] = _tokens_at(self._shards[shard], places, self._vocab_size)
        return {"tokens": tokens}


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
          DataError: If positions do not rise within their sequence, or no document has two tokens.
        """
        self._shards, self._vocab_size = shards, vocab_size
        self._row_length = sequence_length + 1
        pairs = enumerate(zip(shards, documents, strict=True))
        pieces = np.concatenate(
            [_cut(i, tokens, begins, sequence_length) for i, (tokens, begins) in pairs]
        )
        if not len(pieces):
            raise DataError("no document has two tokens. Give more text.")
        rows = pack_items(pieces[:, 2], self._row_length)
        self._pieces = pieces[np.argsort(rows, kind="stable")]
        self._ends = np.cumsum(np.bincount(rows))

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def padding(self) -> float:
        """Share of the rows' places that hold no token of a document."""
        return 1 - int(self._pieces[:, 2].sum()) / (len(self) * self._row_length)

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
        shards, begins, sizes = self._pieces[_ranges(first, counts)].T
        # Place of each piece in its row, and of each token in the batch.
        offsets = np.cumsum(sizes) - sizes
        offsets -= np.repeat(offsets[np.cumsum(counts) - counts], counts)
        rows = np.repeat(np.arange(len(counts)), counts)
        places = _ranges(rows * self._row_length + offsets, sizes)
        tokens, segments = np.zeros((2, len(indices), self._row_length), np.int32)
        segments.reshape(-1)[places] = np.repeat(_ranges(np.ones_like(counts), counts), sizes)
        for shard in np.unique(shards):
            is_here = shards == shard
            found = _tokens_at(
                self._shards[shard], _ranges(begins[is_here], sizes[is_here]), self._vocab_size
            )
            tokens.reshape(-1)[places[np.repeat(is_here, sizes)]] = found
        is_inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        mask = is_inside.astype(np.float32)
        return {"tokens": tokens, "segments": segments[:, :-1], "mask": mask}


def _cut(shard: int, tokens: np.ndarray, begins: np.ndarray, length: int) -> np.ndarray:
    """Pieces of a sequence's documents, each of `length` predictions or fewer, `(n, 3)`.

    The columns are the number of the sequence, and the first token and the size of each piece.
    """
    edges = np.append(begins, len(tokens)).astype(np.int64)
    sizes = np.diff(edges)
    if edges[0] != 0 or (sizes < 0).any():
        raise DataError(
            f"{_file_of(tokens)}the positions of documents do not rise from 0 to {len(tokens):,}, "
            "the number of tokens. Write them again."
        )
    num_predicted = np.maximum(sizes - 1, 0)
    counts = -(-num_predicted // length)
    offsets = _ranges(np.zeros_like(counts), counts) * length
    left = np.repeat(num_predicted, counts) - offsets
    firsts = np.repeat(edges[:-1], counts) + offsets
    sizes = np.minimum(left, length) + 1
    return np.stack([np.full_like(firsts, shard), firsts, sizes], 1)


def _ranges(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """`begin ... begin + size - 1` for each pair, one after the other."""
    ends = np.cumsum(sizes)
    return np.repeat(begins - (ends - sizes), sizes) + np.arange(ends[-1] if len(ends) else 0)
