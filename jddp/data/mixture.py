"""The order of a mixture of sources: exact shares, as a function of (seed, position).

    order = MixtureOrder((1_000, 50_000), weights=(0.3, 0.7), seed=0)
    order.examples_at(np.arange(8))        # numbers of the joined sources: 0 to 50,999

An epoch has as many positions as all sources have examples. After any number of epochs the share
of each source is exact to one example: the sums of shares are rounded down, and the differences of
these sums are the sources' counts. An epoch consists of rounds of like composition, about as many
as passes over the source that is taken most often; the positions of a round are a permutation of
its draws. The draws of a source are its own epochs, one after the other. No permutation is stored,
as in `order`.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import numpy as np

from jddp.data.order import Order, permute, random_keys
from jddp.errors import ConfigError
from jddp.typing import Settings

SEEDS = 2**32  # The orders of sources of one size differ.

Positions = TypeVar("Positions", int, np.ndarray)


@dataclass(frozen=True, eq=False)
class MixtureOrder:
    """Epochs in which each source has a fixed share.

    Attributes:
      sizes: Number of examples of each source, in the order in which they are joined.
      weights: Relative frequencies of the sources; 0.3 is three tenths, not the nearest binary
        fraction.
      seed: Seed of the order; not negative.

    Raises:
      ConfigError: If there is not one weight per source, a weight is not positive and finite, or so
        small that an epoch has less than one example of its source.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int

    def __post_init__(self) -> None:
        is_right = all(0 < weight < math.inf for weight in self.weights)
        if not self.sizes or len(self.sizes) != len(self.weights) or not is_right:
            raise ConfigError(
                f"weights {self.weights} of a mixture of {len(self.sizes)} sources: each source "
                "needs one that is positive and finite."
            )
        if min(self.shares) * self.num_examples < 1:
            raise ConfigError(
                f"weight {min(self.weights):g} of a mixture is less than one example in an epoch "
                f"of {self.num_examples:,}. Raise it, or leave its source out."
            )

    @property
    def num_examples(self) -> int:
        """Number of positions of one epoch, one for each example of each source."""
        return sum(self.sizes)

    @property
    def frequencies(self) -> np.ndarray:
        """How often an epoch takes each example, in the mean of all epochs."""
        shares = np.array([float(share) for share in self.shares])
        return np.repeat(shares * self.num_examples / self.sizes, self.sizes)

    @property
    def settings(self) -> Settings:
        """Settings that must be equal on all processes, by name."""
        return {"seed": self.seed, "sizes": self.sizes, "weights": self.weights}

    @functools.cached_property
    def shares(self) -> tuple[Fraction, ...]:
        """The share of each source."""
        exact = [Fraction(str(weight)) for weight in self.weights]
        return tuple(weight / sum(exact) for weight in exact)

    def examples_at(self, positions: np.ndarray) -> np.ndarray:
        """The indices in the joined sources of the examples at these positions, in any order."""
        indices = np.empty(len(positions), np.int64)
        firsts = np.cumsum(self.sizes) - self.sizes
        for source, here, draws in self._draws(positions):
            indices[here] = firsts[source] + self._orders[source].examples_at(draws)
        return indices

    def uniform(self, positions: np.ndarray, num_draws: int) -> np.ndarray:
        """Random numbers in [0, 1) for the examples at these positions, `(b, num_draws)`.

        They depend on seed, source, example, and how often the source has been seen.
        """
        numbers = np.empty((len(positions), num_draws))
        for source, here, draws in self._draws(positions):
            numbers[here] = self._orders[source].uniform(draws, num_draws)
        return numbers

    @functools.cached_property
    def _orders(self) -> list[Order]:
        return [Order(size, self.seed + SEEDS * i) for i, size in enumerate(self.sizes)]

    @functools.cached_property
    def _num_rounds(self) -> int:
        """Number of rounds of an epoch, each of which has at least an example of each source."""
        passes = (share / size for share, size in zip(self.shares, self.sizes, strict=True))
        most = math.floor(self.num_examples * min(self.shares) / 2)
        wanted = math.ceil(self.num_examples * max(passes))
        return max(1, min(wanted, most, 2**62 // self.num_examples))  # products fit into int64

    def _round_of(self, positions: Positions) -> Positions:
        """The rounds of positions, counted from the first epoch on."""
        num = self._num_rounds
        epochs, rest = divmod(positions, self.num_examples)
        return epochs * num + ((rest + 1) * num - 1) // self.num_examples

    def _begin_of(self, number: int) -> int:
        """The first position of a round."""
        return number * self.num_examples // self._num_rounds

    @functools.cached_property
    def _sums_of_shares(self) -> tuple[Fraction, ...]:
        return tuple(itertools.accumulate(self.shares))

    def _num_before(self, number: int) -> np.ndarray:
        """How many examples of each source come before a round, `(num_sources,)`."""
        begin = self._begin_of(number)
        return np.diff([int(share * begin) for share in self._sums_of_shares], prepend=0)

    def _draws(self, positions: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Each source with its places among these positions, and its own positions there."""
        rounds = self._round_of(positions)
        for number in np.unique(rounds).tolist():
            begin, end = self._begin_of(number), self._begin_of(number + 1)
            before = self._num_before(number)
            ends = np.cumsum(self._num_before(number + 1) - before)
            places = np.flatnonzero(rounds == number)
            keys = random_keys("mixture", self.seed, number)
            slots = permute(positions[places] - begin, end - begin, keys)
            sources = np.searchsorted(ends, slots, side="right")
            firsts = np.r_[0, ends]
            for source in np.unique(sources).tolist():
                is_here = sources == source
                draws = before[source] + slots[is_here] - firsts[source]
                yield source, places[is_here], draws
