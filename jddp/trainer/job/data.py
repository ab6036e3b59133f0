"""The data of a job: examples or streams, and the transforms of their rows.

A stream is batches that come one after the other, instead of numbered examples:

    def stream(global_batch_size, seed, process_index, num_processes):    # of your module
        return train_batches, test_batches

Only the batches know its position, and the first batch has the shapes. Keys that need numbered
examples are refused here.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np

from jddp.config.files import flatten
from jddp.config.schema import Config
from jddp.data import DataSet, DataSource
from jddp.data.batches import Share
from jddp.data.source import Streams, source_of_streams
from jddp.data.transforms import LARGEST, TRANSFORMS, Chain, Normalize, Transform
from jddp.ground.errors import ConfigError, DataError
from jddp.ground.names import check_arguments, defaults_of, look_up
from jddp.ground.typing import TRANSFORM, Batch, Batches, Settings
from jddp.modules.rows import as_arrays

# Keys that need numbered examples, and the way out for each.
NOT_OF_STREAMS = {
    "train.num_epochs": "It has no epochs: give train.num_steps",
    "train.eval_every_epochs": "Give train.eval_every_steps",
    "checkpoint.every_epochs": "Give checkpoint.every_steps",
    "data.num_workers": "It reads its batches itself: leave the key out",
    "data.sample_weights": "Its examples have no numbers: leave the key out",
    "data.mixture": "Mix sources in the stream",
}


def listed_transforms(config: Config) -> tuple[Transform, ...]:
    """The transforms that a config lists.

    Raises:
      ConfigError: If a name or an argument is unknown.
    """
    found = []
    for i, section in enumerate(config.data.transforms or ()):
        key = f"data.transforms[{i}]"
        make = look_up(section.name, TRANSFORMS, key=f"{key}.name", kind="transform")
        check_arguments(make, section.kwargs, key=f"{key}.kwargs")
        found.append(make(**section.kwargs))
    return tuple(found)


def check_listed(config: Config, source: DataSource | None) -> None:
    """Refuses transforms that the data of a config cannot take.

    Args:
      config: Config of the job.
      source: Source of the data; None if it could not be made.

    Raises:
      ConfigError: If a name or an argument is unknown, the data have no images, or their images
        would be normalized twice.
    """
    listed = listed_transforms(config)
    if listed and source is not None and source.open_streams is None:
        dtypes = {name: dtype for name, (_, dtype) in source.spec.items()}
        _check_rows(config.data.name or str(config.data.target), dtypes, listed)


def _check_rows(name: str, dtypes: Mapping[str, np.dtype], listed: Sequence[Transform]) -> None:
    if "image" not in dtypes:
        raise ConfigError(
            f"data.transforms change images, and {name} has {', '.join(dtypes)}. Set it to []."
        )
    dtype = dtypes["image"]
    if dtype.name not in LARGEST and any(isinstance(x, Normalize) for x in listed):
        raise ConfigError(
            "data.transforms lists normalize, which divides uint8 by 255 and uint16 by 65,535, but "
            f"images of {name} are {dtype} numbers. Leave it out, or store unscaled images as "
            "uint8 or uint16; images of files have data.kwargs.mean and data.kwargs.std."
        )


class OfStream:
    """The transforms that a config lists, as a function of each batch of a stream.

    Raises:
      ConfigError: If one needs random numbers, which only numbered examples have.
    """

    def __init__(self, config: Config) -> None:
        self._chain = Chain(listed_transforms(config))
        for i, transform in enumerate(self._chain.transforms):
            if transform.num_draws:
                raise ConfigError(
                    f"data.transforms[{i}] needs random numbers of each example, and the examples "
                    "of a stream have no numbers. Transform rows in the stream."
                )

    def __call__(self, batch: Batch) -> Batch:
        """The changed rows; or the rows, and the function that the step calls first.

        Raises:
          ConfigError: If there are no images, or they would be normalized twice.
        """
        if not self._chain.transforms:
            return batch
        rows = as_arrays(batch)
        named = rows if isinstance(rows, Mapping) else {}
        dtypes = {name: x.dtype for name, x in named.items()}
        _check_rows("the stream", dtypes, self._chain.transforms)
        return {**named, TRANSFORM: self._chain}


class _Made:
    """Batches that a function makes each time they are iterated."""

    def __init__(self, make: Callable[[], Iterable[Batch]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._make())


def source_of_batches(name: str, train: Batches, test: object) -> DataSource:
    """The source of a stream that a function named in a config has returned.

    Args:
      name: The function.
      train: Training batches of this process.
      test: Evaluation batches of this process, or a function that returns them.

    Raises:
      ConfigError: If the evaluation batches can be read only once, or are no batches.
    """
    if isinstance(test, Iterable) and not isinstance(test, Iterator | Mapping):
        tests: Batches = test
    elif callable(test):
        tests = _Made(test)
    else:
        raise ConfigError(
            f"data.target: with a stream for training {name} returns {type(test).__name__}. It "
            "must return batches that can be iterated again, such as a list of them or "
            "jddp.data.eval_batches(...), or a function that returns batches."
        )
    streams = Streams(train, tests, f"stream of {name}")
    return source_of_streams(streams.description, lambda *_: streams)


def stream_arguments(function: Callable[..., object], config: Config) -> Settings:
    """Arguments that jddp fills in for a function in a config: all without a default.

    They are `global_batch_size`, `seed`, `process_index` and `num_processes`.
    """
    share = Share.of(None, None)
    known = {
        "global_batch_size": config.data.global_batch_size,
        "seed": config.seed,
        "process_index": share.process_index,
        "num_processes": share.num_processes,
    }
    needed = {name for name, x in defaults_of(function).items() if x is inspect.Parameter.empty}
    return {name: x for name, x in known.items() if name in needed - config.data.kwargs.keys()}


def open_data(source: DataSource, config: Config) -> DataSet | Streams:
    """The data of a source: examples, or streams.

    Raises:
      ConfigError: If the config needs examples with numbers, and this is a stream; one line each.
      DataError: If the data are absent or damaged.
    """
    if source.open_streams is None:
        return source.load()
    given = flatten(config.model_dump())
    mistakes = [
        f"{key}={given[key]} and a stream of batches cannot be combined. {instead}."
        for key, instead in NOT_OF_STREAMS.items()
        if given[key]
    ]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    change = OfStream(config)
    size, share = config.data.global_batch_size, Share.of(None, None)
    streams = source.open_streams(size, config.seed, share)
    return dataclasses.replace(streams, test=_Made(lambda: map(change, streams.test)))


def check_first(config: Config, batch: Batch) -> None:
    """Compares the rows of the first batch, as arrays, with the batch size of a config.

    Raises:
      ConfigError: If their number differs.
      DataError: If it is a single example, or holds nothing.
    """
    first, *_ = *jax.tree.leaves(batch), np.zeros(())
    if not first.ndim:
        raise DataError(
            "the stream returns single examples. It must return batches, whose arrays have a row "
            "for each example: .batch(n) of datasets or of grain makes them."
        )
    num_processes = jax.process_count()
    size, found = config.data.global_batch_size, len(first) * num_processes
    if found != size:
        each = f" on each of {num_processes} processes" if num_processes > 1 else ""
        raise ConfigError(
            f"data.global_batch_size={size}, but a batch of the stream has {len(first)} rows"
            f"{each}. Set data.global_batch_size={found}, or let the function of data.target take "
            "global_batch_size and num_processes."
        )
