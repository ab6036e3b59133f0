"""Text that is on every machine: the source files of the running Python's standard library.

The text is about 11 MB of Python, read as bytes (a vocabulary of 256), with a zero byte after each
file. A hash of the file's name puts about one file in ten into the test split, so that adding or
removing a file moves no other. The text depends on the version of Python: its hash is in the log.
"""

import os
import sysconfig
from hashlib import sha256
from pathlib import Path

import numpy as np

from jddp.data.examples import Examples
from jddp.data.source import DataSet, DataSource
from jddp.data.sources.tokens import packing_of, token_examples, token_spec
from jddp.errors import DataError, words_of

VOCAB_SIZE = 256

# Tests, installed packages, a whole editor: neither typical nor on every machine.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib"}
_MACHINE_MADE = ("_sysconfigdata", "config-")  # written when this interpreter was built


def python_stdlib(*, sequence_length: int = 256, documents: str = "cross") -> DataSource:
    """The source of the standard library's text.

    Args:
      sequence_length: Bytes that are predicted per example.
      documents: What becomes of documents, each a file: "cross", "mask" or "pack" (see `tokens`).

    Raises:
      ConfigError: If an argument breaks its rule.
    """
    spec = token_spec(sequence_length, documents)
    root = Path(sysconfig.get_path("stdlib"))
    return DataSource(
        spec,
        lambda: _load(root, sequence_length, documents),
        sizes={"vocab_size": VOCAB_SIZE},
        bytes_per_token=1.0,
    )


def source_files(root: Path) -> list[Path]:
    """The source files under `root` that count as text: relative paths, in a fixed order."""
    found = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if _is_text(name)]
        here = Path(directory).relative_to(root)
        found += [here / name for name in names if name.endswith(".py") and _is_text(name)]
    return sorted(found, key=Path.as_posix)


def _is_text(name: str) -> bool:
    return name not in _SKIPPED and not name.startswith(_MACHINE_MADE)


def _load(root: Path, sequence_length: int, documents: str) -> DataSet:
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in source_files(root):
        is_test = sha256(path.as_posix().encode()).digest()[0] % 10 == 0
        try:
            parts[is_test].append((root / path).read_bytes() + b"\0")
        except OSError as error:
            raise DataError(
                f"{root / path}: {words_of(error)}. Repair the installation."
            ) from error
    if not all(parts.values()):
        raise DataError(
            f"{root}: no source files of the standard library. This Python was installed without "
            "them; use another one, or data.name=tokens."
        )
    num_train, num_test = (sum(map(len, parts[is_test])) for is_test in (False, True))
    digest = sha256(b"".join(parts[False] + parts[True])).hexdigest()

    def examples(texts: list[bytes]) -> Examples:
        text = np.frombuffer(b"".join(texts), np.uint8)
        begins = np.cumsum([0, *map(len, texts)])[:-1]
        return token_examples([text], [begins], documents, sequence_length=sequence_length)

    train, test = examples(parts[False]), examples(parts[True])
    description = (
        f"Python's standard library: {num_train:,} train / {num_test:,} test bytes of "
        f"{sum(map(len, parts.values())):,} files{packing_of(train)}, sha256 {digest[:12]}"
    )
    return DataSet(train, test, description, digest)
