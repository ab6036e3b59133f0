"""A mixture of sources: training examples in exact shares, and all test examples."""

import dataclasses
from collections.abc import Mapping, Sequence
from hashlib import sha256

from jddp.data.concatenated import Concatenated
from jddp.data.mixture import MixtureOrder
from jddp.data.source import DataSet, DataSource
from jddp.errors import ConfigError


def mixed_source(sources: Mapping[str, DataSource], weights: Sequence[float]) -> DataSource:
    """The source that mixes several, such as the same format in several folders.

    Args:
      sources: Sources by name.
      weights: Relative frequencies of the sources in training.

    Raises:
      ConfigError: If their examples have different shapes, vocabularies or categories.
    """
    (first_name, first), *others = sources.items()
    for name, source in others:
        if _content_of(source) != _content_of(first):
            raise ConfigError(
                f"data.mixture: {first_name} holds {_content_of(first)}, and {name} "
                f"{_content_of(source)}. Mix data of one kind: text of one tokenizer, say."
            )
    bytes_per_token = {source.bytes_per_token for source in sources.values()}
    return dataclasses.replace(
        first,
        load=lambda: _load(sources, tuple(weights)),
        # The mean over all test examples is known if it is the same of each source.
        bytes_per_token=bytes_per_token.pop() if len(bytes_per_token) == 1 else None,
    )


def _load(sources: Mapping[str, DataSource], weights: tuple[float, ...]) -> DataSet:
    sets = {name: source.load() for name, source in sources.items()}
    (first_name, first), *others = sets.items()
    for name, data in others:
        if data.classes != first.classes or data.encoding != first.encoding:
            raise ConfigError(
                f"data.mixture: {first_name} and {name} have different classes or columns. Mix "
                "data of the same ones."
            )
    names, sizes = [*sets], tuple(len(data.train) for data in sets.values())
    train = Concatenated([data.train for data in sets.values()], names)
    test = Concatenated([data.test for data in sets.values()], names)
    shares = _shares(names, MixtureOrder(sizes, weights, 0))
    return dataclasses.replace(
        first,
        train=train,
        test=test,
        description=f"{shares}: {len(train):,} train / {len(test):,} test examples",
        sha256=sha256("".join(data.sha256 for data in sets.values()).encode()).hexdigest(),
        order=lambda seed: MixtureOrder(sizes, weights, seed),
    )


def _shares(names: Sequence[str], order: MixtureOrder) -> str:
    """Words on the share of each source, and on how often an epoch takes all its examples."""
    parts = [
        f"{float(share):.3g} of {name} ({float(share * order.num_examples / size):.3g} times)"
        for name, share, size in zip(names, order.shares, order.sizes, strict=True)
    ]
    return f"mixture, an epoch of {', '.join(parts)}"


def _content_of(source: DataSource) -> str:
    """Words on what must be equal where sources are mixed."""
    arrays = ", ".join(f"{name} {shape} {dtype}" for name, (shape, dtype) in source.spec.items())
    sizes = [f"{name} {size:,}" for name, size in source.sizes.items()]
    tokenizer = [f"tokenizer {source.tokenizer!r}"] if source.tokenizer else []
    categories = [f"categories {[*source.num_categories]}"] if source.num_categories else []
    return ", ".join([arrays, *sizes, *tokenizer, *categories])
