"""Writes the token files that `tokens` reads, from text.

    write_tokens(documents_in([Path("books")]), Path("data/tokens"), tokenizer=BYTES)

A hash of its text puts a document into the test split or the training split, so the order and the
number of files do not matter. At most one file of tokens is held in memory.
"""

import argparse
import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from jddp.ground.errors import ConfigError, DataError, show, words_of
from jddp.ground.typing import JsonObject


@dataclass(frozen=True)
class Tokenizer:
    """Turns text into numbers, and numbers into text.

    Attributes:
      name: Name of the tokenizer, for tokens.json.
      vocab_size: Number of different tokens; all tokens are below it.
      encode: Function that returns the tokens of a text.
      decode: Function that returns the text of tokens.
      end_of_document: Token to put after each document, or None.
    """

    name: str
    vocab_size: int
    encode: Callable[[str], Sequence[int] | np.ndarray]
    decode: Callable[[Sequence[int]], str]
    end_of_document: int | None = None


def _bytes_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def _text_of(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


# Names of files that `data.name=tokens` reads.
INDEX, DOCUMENTS = "tokens.json", ".documents.npy"
BYTES = Tokenizer("bytes", 256, _bytes_of, _text_of, 0)


def tokenizer_in(path: Path, *, end_of_document: str | None = None) -> Tokenizer:
    """A tokenizer of Hugging Face's `tokenizers`, which puts no special tokens around a text.

    Args:
      path: Path of its JSON file.
      end_of_document: Token that ends a document, as text; None for none.

    Raises:
      ConfigError: If `tokenizers` is not installed or cannot read the file, or if the token is
        unknown.
    """
    try:
        tokenizers: Any = importlib.import_module("tokenizers")
        found = tokenizers.Tokenizer.from_file(str(path))
    except ImportError as error:
        raise ConfigError("--tokenizer FILE needs tokenizers: pip install 'jddp[data]'.") from error
    except Exception as error:  # tokenizers has no class of errors
        raise ConfigError(f"{path}: not a Hugging Face tokenizer file ({error}).") from error
    end = None if end_of_document is None else found.token_to_id(end_of_document)
    if end is None and end_of_document is not None:
        raise ConfigError(f"{path} has no token {end_of_document!r}. Name one of its tokens.")

    def encode(text: str) -> Sequence[int]:
        return found.encode(text, add_special_tokens=False).ids

    size = max(found.get_vocab().values()) + 1  # exceeds the number of tokens if ids are skipped
    return Tokenizer(path.name, size, encode, found.decode, end)


def documents_in(paths: Sequence[Path]) -> Iterator[str]:
    """The documents in files: "text" of each line of a .jsonl, or any other file as a whole.

    Args:
      paths: Files, and folders whose files are read in the order of their names.

    Raises:
      DataError: If a file is missing or not UTF-8, or a line has no "text".
    """
    for path in paths:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            try:
                yield from _documents_of(file)
            except OSError as error:
                raise DataError(f"{file}: {words_of(error)}.") from error
            except UnicodeDecodeError as error:
                raise DataError(f"{file}: not UTF-8 at byte {error.start:,}.") from error


def _documents_of(file: Path) -> Iterator[str]:
    if file.suffix != ".jsonl":
        yield file.read_text(encoding="utf-8")
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                # Null and lone surrogates are refused.
                text = bytes(json.loads(line)["text"], "utf-8").decode()
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f'{file}: line {number} is not an object with "text".') from error
            yield text


def write_tokens(
    documents: Iterable[str],
    directory: Path,
    *,
    tokenizer: Tokenizer,
    test_share: float = 0.1,
    shard_tokens: int = 2**27,
) -> JsonObject:
    """Writes token files, the positions at which documents begin, and tokens.json.

    Args:
      documents: Texts of the documents.
      directory: Output directory, which must hold no token files yet.
      tokenizer: Tokenizer of the texts.
      test_share: Fraction of documents for testing; the rest is for training.
      shard_tokens: Length of a file, which ends with the document that reaches it.

    Returns:
      The content of tokens.json.

    Raises:
      ConfigError: If the directory holds tokens already, an argument breaks its rule, or a token
        is not below the size of the vocabulary.
      DataError: If a split gets no document.
    """
    if not 0 < test_share < 1 or shard_tokens < 1:
        raise ConfigError("The test share must be between 0 and 1, and shard_tokens at least 1.")
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.glob("*.npy")):
        raise ConfigError(f"{directory} holds .npy files already. Choose another folder.")
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    parts = {name: _Part(directory, name, shard_tokens) for name in ("train", "test")}
    for text in documents:
        draw = int.from_bytes(sha256(text.encode()).digest()[:8], "big") / 2**64
        part = parts["test" if draw < test_share else "train"]
        tokens = np.asarray(tokenizer.encode(text), np.int64)
        if tokenizer.end_of_document is not None:
            tokens = np.append(tokens, tokenizer.end_of_document)
        if (beyond := tokens[(tokens < 0) | (tokens >= tokenizer.vocab_size)]).size:
            raise ConfigError(
                f"The tokenizer {tokenizer.name} gives token {beyond[0]}, and its vocab_size is "
                f"{tokenizer.vocab_size}. Raise it."
            )
        part.add(tokens.astype(dtype), num_bytes=len(text.encode()))
    for name, part in parts.items():
        part.end_shard()
        if not part.num_documents:
            raise DataError(f"{name} got no document. Give more documents, or another test share.")
    index = {
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
        "documents": {name: part.num_documents for name, part in parts.items()},
        "tokens": {name: part.num_tokens for name, part in parts.items()},
        "bytes": {name: part.num_bytes for name, part in parts.items()},
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return index


class _Part:
    """Files of one split, written one after the other."""

    def __init__(self, directory: Path, name: str, shard_tokens: int) -> None:
        self._directory = directory
        self._name = name
        self._shard_tokens = shard_tokens
        self._documents: list[np.ndarray] = []
        self._num_shards = self._in_shard = self.num_tokens = self.num_documents = 0
        self.num_bytes = 0

    def add(self, tokens: np.ndarray, *, num_bytes: int) -> None:
        self._documents.append(tokens)
        self._in_shard += len(tokens)
        self.num_tokens += len(tokens)
        self.num_documents += 1
        self.num_bytes += num_bytes
        if self._in_shard >= self._shard_tokens:
            self.end_shard()

    def end_shard(self) -> None:
        if not self._documents:
            return
        stem = f"{self._name}-{self._num_shards:05}"
        ends = np.cumsum([len(tokens) for tokens in self._documents])
        np.save(self._directory / f"{stem}.npy", np.concatenate(self._documents))
        np.save(self._directory / f"{stem}{DOCUMENTS}", np.concatenate([[0], ends[:-1]]))
        self._documents = []
        self._in_shard = 0
        self._num_shards += 1


def run_tokenize(arguments: argparse.Namespace) -> None:
    """Writes the token files that `jddp data tokenize` asks for."""
    chosen = arguments.tokenizer
    end = arguments.end_of_document
    index = write_tokens(
        documents_in(arguments.texts),
        arguments.directory,
        tokenizer=BYTES if chosen == "bytes" else tokenizer_in(Path(chosen), end_of_document=end),
        test_share=arguments.test_share,
        shard_tokens=arguments.shard_tokens,
    )
    for part, num_tokens in index["tokens"].items():
        num_documents, num_bytes = index["documents"][part], index["bytes"][part]
        show(f"{part:5}  {num_documents:,} documents, {num_tokens:,} tokens, {num_bytes:,} bytes")
    show(
        f"train with data.name=tokens data.dir={arguments.directory} "
        f"data.kwargs.sequence_length=... , and a model of vocab_size {index['vocab_size']:,}"
    )
