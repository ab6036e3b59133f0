"""Data sets, and sources that load them: of two parts, of one that is split, and mixtures.

    is_test = rows_for_testing(len(rows), 0.2)
    train, test = selected_parts(read, 0.2, Subset)

Where the data has one part, the number of a row decides whether it is for testing, and no seed: a
row stays on its side when others are added after it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence, Sized
from hashlib import sha256
from typing import TypeVar

import numpy as np

from jddp.data.batches import Share
from jddp.data.examples import Concatenated, Examples, Subset, as_examples
from jddp.data.order import ExampleOrder, MixtureOrder
from jddp.data.transforms import Transform
from jddp.ground.errors import ConfigError, DataError, UsageError
from jddp.ground.typing import Batches, Shown

Spec = dict[str, tuple[tuple[int, ...], np.dtype]]

_NUM_FINGERPRINT_ROWS = 64


@dataclasses.dataclass(frozen=True)
class DataSet(Shown):
    """Training examples and test examples.

    Attributes:
      train: Examples that the model is trained on.
      test: Examples that it is evaluated on.
      description: One line for the log: name of the data, number of examples.
      sha256: Hash of the data, for the manifest of the run.
      classes: Names of the classes, in the order of their numbers; empty if there are none.
      order: Function of a seed that returns the order of a run; None for an order of permutations.
    """

    train: Examples
    test: Examples
    description: str
    sha256: str
    classes: tuple[str, ...] = ()
    order: Callable[[int], ExampleOrder] | None = None

    def __str__(self) -> str:
        """The description, and the arrays of an example."""
        spec = spec_of(self.train).items()
        arrays = [f"{name}: {dtype.name}{[*shape]}" for name, (shape, dtype) in spec]
        return "\n".join([self.description, *arrays])


@dataclasses.dataclass(frozen=True)
class Streams:
    """Batches of one process that come one after the other, of examples without numbers.

    Attributes:
      train: Batches that the model is trained on, enough for all steps. They may know their
        position, as `jddp.fit` requires of batches that resume without being read again.
      test: Batches that it is evaluated on, iterated from the beginning each time.
      description: One line for the log.
      sha256: Hash of the data; empty, as it would need all of them.
      classes: Names of the classes, in the order of their numbers; empty if there are none.
    """

    train: Batches
    test: Batches
    description: str
    sha256: str = ""
    classes: tuple[str, ...] = ()


# Opens streams, from the global batch size, a seed and the share of this process.
OpenStreams = Callable[[int, int, Share], Streams]


@dataclasses.dataclass(frozen=True)
class DataSource:
    """A data set that can be loaded, with the shapes of one example, known before loading.

    Attributes:
      spec: Shape and dtype of each array of one example, without the leading batch dim.
      load: Function that reads and checks the data.
      augment: Transforms that make new training examples of these, at random.
      sizes: Number of classes or tokens, by its name in models: "num_classes" or "vocab_size";
        empty if only the examples show it.
      tokenizer: Name of the tokenizer, of tokens; empty if it is unknown.
      open_streams: Function that opens streams, in the place of `load`; None for examples.
      bytes_per_token: Mean number of bytes of text that a token of the test examples stands for;
        None if it is not known.
    """

    spec: Spec
    load: Callable[[], DataSet]
    augment: tuple[Transform, ...] = ()
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tokenizer: str = ""
    open_streams: OpenStreams | None = None
    bytes_per_token: float | None = None


def make_data_set(
    name: str, train: object, test: object, *, sha256_hex: str = "", classes: Sequence[str] = ()
) -> DataSet:
    """A data set of two dicts of arrays, or of examples.

    Args:
      name: First words of the description.
      train: Training data.
      test: Test data.
      sha256_hex: Hash of the data; by default of its sizes and of the rows at both ends.
      classes: Names of the classes.

    Raises:
      DataError: If the data cannot be read (see `ArrayExamples` and `as_examples`).
    """
    both = as_examples(train), as_examples(test)
    return DataSet(
        *both,
        description=f"{name}: {len(both[0]):,} train / {len(both[1]):,} test examples",
        sha256=sha256_hex or sha256(b"".join(map(_fingerprint, both))).hexdigest(),
        classes=tuple(classes),
    )


def source_of(name: str, train: object, test: object) -> DataSource:
    """A source of data that is already open.

    Raises:
      DataError: If the data cannot be read.
    """
    data = make_data_set(name, train, test)
    return DataSource(spec_of(data.train), lambda: data)


def source_of_streams(name: str, open_streams: OpenStreams) -> DataSource:
    """A source of streams. Its spec is empty: the first batch has the shapes."""

    def load() -> DataSet:
        raise UsageError(f"{name}: the examples of a stream have no numbers. Give examples.")

    return DataSource({}, load, open_streams=open_streams)


def parts_of(read: Callable[[str], object], test_share: float | None) -> tuple[Examples, Examples]:
    """The examples for training, and the examples for testing.

    Args:
      read: Function that returns the part "train" or "test".
      test_share: Fraction of the training part that is for testing in place of "test"; None to read
        both.

    Raises:
      ConfigError: If the share is not between 0 and 1.
      DataError: If the data cannot be read.
    """
    return selected_parts(lambda part: as_examples(read(part or "train")), test_share, Subset)


def image_spec(*shape: int) -> Spec:
    """The spec of images of that shape, `(height, width, channels)`, with labels."""
    return {"image": (shape, np.dtype("float32")), "label": ((), np.dtype("int32"))}


def spec_of(examples: Examples) -> Spec:
    """Shape and dtype of each array of one example, read from the first."""
    first = examples.take(np.arange(1))
    return {name: (array.shape[1:], array.dtype) for name, array in first.items()}


def _fingerprint(examples: Examples) -> bytes:
    """A hash of the number of examples and the rows at both ends: the whole may be terabytes."""
    num_rows = min(_NUM_FINGERPRINT_ROWS, len(examples))
    ends = np.r_[:num_rows, len(examples) - num_rows : len(examples)]
    digest = sha256(str(len(examples)).encode())
    for name, array in sorted(examples.take(ends).items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.digest()


_Rows = TypeVar("_Rows", bound=Sized)


def rows_for_testing(
    num_rows: int, test_share: float, draws: np.ndarray | None = None
) -> np.ndarray:
    """Which of the rows are for testing, `(num_rows,)`: about this share of them.

    Args:
      num_rows: Number of rows.
      test_share: Fraction of the rows that is for testing.
      draws: A number from 0 to 1 for each row; by default random numbers, the same ones always.

    Raises:
      ConfigError: If the share is not between 0 and 1.
      DataError: If all rows are on one side.
    """
    if not 0 < test_share < 1:
        raise ConfigError(f"data.kwargs.test_share: {test_share!r} is not between 0 and 1.")
    if draws is None:
        # numpy promises Philox's raw bits, not what `Generator` makes of them (NEP 19).
        draws = np.random.Philox(key=0).random_raw(num_rows) * 2.0**-64
    is_test = draws < test_share
    if is_test.all() or not is_test.any():
        raise DataError(
            f"test_share={test_share} leaves one part of {num_rows} rows empty. Choose another "
            "share, or give files for testing."
        )
    return is_test


def selected_parts(
    read: Callable[[str], _Rows],
    test_share: float | None,
    select: Callable[[_Rows, np.ndarray], _Rows],
    draws: Callable[[_Rows], np.ndarray | None] = lambda rows: None,
) -> tuple[_Rows, _Rows]:
    """The rows for training, and the rows for testing.

    Args:
      read: Function that returns the rows of the part "train" or "test"; of "", all.
      test_share: Fraction of all rows that is for testing; None to read both parts.
      select: Function of rows and indices that returns these rows.
      draws: Function of rows; its numbers decide which rows are for testing.

    Raises:
      ConfigError: If the share is not between 0 and 1.
      DataError: If one of the two has no row.
    """
    if test_share is None:
        return read("train"), read("test")
    rows = read("")
    is_test = rows_for_testing(len(rows), test_share, draws(rows))
    train, test = (select(rows, np.flatnonzero(x)) for x in (~is_test, is_test))
    return train, test


def mixed_source(sources: Mapping[str, DataSource], weights: Sequence[float]) -> DataSource:
    """The source that mixes several, such as the same format in several folders.

    Args:
      sources: Sources by name.
      weights: Relative frequencies of the sources in training.

    Raises:
      ConfigError: If their examples have different shapes or vocabularies.
    """
    (first_name, first), *others = sources.items()
    for name, source in others:
        if _content_of(source) != _content_of(first):
            raise ConfigError(
                f"data.mixture: {first_name} holds {_content_of(first)}, and {name} "
                f"{_content_of(source)}. Mix data of one kind: text of one tokenizer, say."
            )
    bytes_per_token = {source.bytes_per_token for source in sources.values()}

    def load() -> DataSet:
        sets = {name: source.load() for name, source in sources.items()}
        (first_name, first_set), *others = sets.items()
        for name, data in others:
            if data.classes != first_set.classes:
                raise ConfigError(
                    f"data.mixture: {first_name} and {name} have different classes. Mix data of "
                    "the same classes."
                )
        sizes = tuple(len(data.train) for data in sets.values())
        order_of = functools.partial(MixtureOrder, sizes, tuple(weights))
        train = Concatenated([data.train for data in sets.values()])
        test = Concatenated([data.test for data in sets.values()])
        # The share of each source, and how often an epoch takes all its examples.
        shares = ", ".join(
            f"{float(share):.3g} of {name} ({float(share * len(train) / size):.3g} times)"
            for name, share, size in zip(sets, order_of(0).shares, sizes, strict=True)
        )
        return dataclasses.replace(
            first_set,
            train=train,
            test=test,
            description=f"mixture, an epoch of {shares}: {len(train):,} train / {len(test):,} test "
            "examples",
            sha256=sha256("".join(data.sha256 for data in sets.values()).encode()).hexdigest(),
            order=order_of,
        )

    # The mean over all test examples is known if it is the same for each source.
    known = bytes_per_token.pop() if len(bytes_per_token) == 1 else None
    return dataclasses.replace(first, load=load, bytes_per_token=known)


def _content_of(source: DataSource) -> str:
    """Describes the facts that must be equal where sources are mixed."""
    arrays = ", ".join(f"{name} {shape} {dtype}" for name, (shape, dtype) in source.spec.items())
    tokenizer = f", tokenizer {source.tokenizer!r}" if source.tokenizer else ""
    return f"{arrays}, sizes {[*source.sizes.values()]}{tokenizer}"
