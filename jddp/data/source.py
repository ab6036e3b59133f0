"""What a source of data is, before it is read and after."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from jddp.data.augment import Augment
from jddp.data.examples import Examples
from jddp.data.rows import as_examples

Spec = dict[str, tuple[tuple[int, ...], np.dtype]]

_NUM_FINGERPRINT_ROWS = 64


@dataclass(frozen=True)
class DataSet:
    """Examples to train on and examples to judge by.

    Attributes:
      name: Which data this is.
      train: What the model sees.
      test: What it is judged by.
      description: One line for the log: which source, how many examples.
      sha256: Identifies what was read, for the manifest of the run.
    """

    name: str
    train: Examples
    test: Examples
    description: str
    sha256: str


@dataclass(frozen=True)
class Source:
    """A place to read from, that knows the shape of one example without reading.

    Attributes:
      name: Which data this is.
      spec: Shape and dtype of each array of one example, without the leading batch dim.
      load: Reads and checks the data.
      augment: How training examples may be changed, or `None`.
      sizes: Number of classes, or of tokens, as models call it: "num_classes" or "vocab_size";
        empty where only the examples would say.
    """

    name: str
    spec: Spec
    load: Callable[[], DataSet]
    augment: Augment | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)


def make_data_set(name: str, train: object, test: object) -> DataSet:
    """A data set from a user's own dicts of arrays, or examples.

    Raises:
      DataError: If they cannot be read (see `ArrayExamples` and `as_examples`).
    """
    to_train, to_test = as_examples(train), as_examples(test)
    return DataSet(
        name=name,
        train=to_train,
        test=to_test,
        description=f"{name}: {len(to_train):,} train / {len(to_test):,} test examples",
        sha256=sha256(_fingerprint(to_train) + _fingerprint(to_test)).hexdigest(),
    )


def spec_of(examples: Examples) -> Spec:
    """Shape and dtype of each array of one example, read from the first."""
    first = examples.take(np.arange(1))
    return {name: (array.shape[1:], array.dtype) for name, array in first.items()}


def _fingerprint(examples: Examples) -> bytes:
    """Hashes the number of examples and the rows at both ends: all of them may be terabytes."""
    num_rows = min(_NUM_FINGERPRINT_ROWS, len(examples))
    ends = np.r_[:num_rows, len(examples) - num_rows : len(examples)]
    digest = sha256(str(len(examples)).encode())
    for name, array in sorted(examples.take(ends).items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.digest()
