"""The order of examples in a run: a pure function of (seed, epoch, position).

A run reads positions 0, 1, 2, ... endlessly. Position `p` is in epoch `p // num_examples`, every
epoch is a permutation of all examples, and epochs follow each other without a gap. Nothing here
depends on batch sizes, processes or devices, so a run keeps its order when any of them changes,
and resumes at any position without replaying the ones before.

No permutation is stored: a Feistel network maps each index by itself, so a billion examples cost no
more than ten. With sample weights, an epoch takes each example as often as its weight demands,
rounded down or up, instead of sampling at random.

    order = MixtureOrder((1_000, 50_000), weights=(0.3, 0.7), seed=0)
    order.examples_at(np.arange(8))        # numbers of the joined sources: 0 to 50,999

An epoch of a mixture has as many positions as all sources have examples. After any number of epochs
the share of each source is exact to one example: the sums of shares are rounded down, and the
differences of these sums are the sources' counts. An epoch consists of rounds of like composition,
about as many as passes over the source that is taken most often; the positions of a round are a
permutation of its draws. The draws of a source are its own epochs, one after the other.

References:
  Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 5, for the
  network and for walking the cycle where its domain is larger than the permuted range.
  Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, for the
  finalizer that mixes bits.
  Kitagawa, "Monte Carlo Filter and Smoother", JCGS 1996, for systematic sampling.
"""

import functools
import itertools
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from jddp.ground.errors import ConfigError, DataError
from jddp.ground.typing import Settings

Stream = Literal["order", "augment", "weights", "mixture"]

_STREAMS = {"order": 0, "augment": 1, "weights": 2, "mixture": 3}

# With this number all permutations of few examples are equally frequent; with twelve they are not.
NUM_ROUNDS = 16


@dataclass(frozen=True, eq=False)
class Order:
    """Epochs that are permutations of all examples.

    Attributes:
      num_examples: Number of examples of one epoch.
      seed: Seed of the permutations; not negative.
      shuffle: Whether each epoch is a new permutation, or in the order of the data.
      weights: Sample weights, `(num_examples,)`: relative frequency of each example; None for equal
        weights.

    Raises:
      ConfigError: If the seed is negative.
      DataError: If there is not one weight per example, a weight is negative or not finite, or none
        is positive.
    """

    num_examples: int
    seed: int
    shuffle: bool = True
    weights: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed {self.seed} is negative. Choose 0 or a larger whole number.")
        if self.weights is not None:
            _check_weights(self.weights, self.num_examples)

    @property
    def settings(self) -> Settings:
        """Settings that must be equal on all processes, by name."""
        weights = None if self.weights is None else zlib.crc32(self.weights.tobytes())
        return {"seed": self.seed, "shuffle": self.shuffle, "weights": weights}

    def examples_at(self, positions: np.ndarray) -> np.ndarray:
        """The indices of the examples at these positions of the run, in any order."""
        draws = self._draws_at(positions)
        if self.weights is None:
            return draws
        offsets = (self._key_of_epoch("weights", positions) >> np.uint64(11)) * 2.0**-53
        ends = self._ends
        points = (draws + offsets) * (ends[-1] / self.num_examples)
        # A point that is rounded up to the very end belongs to the last example of any weight.
        return np.searchsorted(ends, np.minimum(points, np.nextafter(ends[-1], 0)), side="right")

    def _draws_at(self, positions: np.ndarray) -> np.ndarray:
        """Numbers of draws within their epochs: the examples, if there are no weights."""
        epochs, draws = np.divmod(positions, self.num_examples)
        for epoch in np.unique(epochs) if self.shuffle else ():
            here = epochs == epoch
            keys = random_keys("order", self.seed, int(epoch))
            draws[here] = permute(draws[here], self.num_examples, keys)
        return draws

    def _key_of_epoch(self, stream: Stream, positions: np.ndarray) -> np.ndarray:
        epochs, numbers = np.unique(positions // self.num_examples, return_inverse=True)
        keys = [random_keys(stream, self.seed, int(epoch))[0] for epoch in epochs]
        return np.array(keys, np.uint64)[numbers]

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        assert self.weights is not None
        return np.cumsum(self.weights, dtype=np.float64)

    def uniform(self, positions: np.ndarray, num_draws: int) -> np.ndarray:
        """Random numbers in [0, 1) for the examples at these positions, `(b, num_draws)`.

        They depend on seed, epoch and example, not on the batch that has the example. An example
        that its weight repeats within an epoch gets other numbers each time.
        """
        bits = self._draws_at(positions).astype(np.uint64)
        bits ^= self._key_of_epoch("augment", positions)
        draws = np.arange(1, num_draws + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (_mix(_mix(bits)[:, None] + draws) >> np.uint64(11)) * 2.0**-53


def permute(indices: np.ndarray, num_examples: int, keys: np.ndarray) -> np.ndarray:
    """The positions of these indices in a permutation of `num_examples`.

    Args:
      indices: Indices from 0 to below `num_examples`.
      num_examples: Number of permuted indices, at least 1.
      keys: Keys of the permutation: an even number of random uint64.
    """
    width = math.isqrt(num_examples - 1) + 1
    height = -(-num_examples // width)
    places = _scramble(indices.astype(np.uint64), width, height, keys)
    while (outside := places >= num_examples).any():
        places[outside] = _scramble(places[outside], width, height, keys)
    return places.astype(np.int64)


def _scramble(places: np.ndarray, width: int, height: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of `width * height` places: a Feistel network on their rows and columns."""
    w, h = np.uint64(width), np.uint64(height)
    x: np.ndarray = places % w
    y: np.ndarray = places // w
    for even, odd in keys.reshape(-1, 2):
        x = (x + _mix(y ^ even) % w) % w
        y = (y + _mix(x ^ odd) % h) % h
    return y * w + x


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@functools.lru_cache(maxsize=8)
def random_keys(stream: Stream, seed: int, epoch: int) -> np.ndarray:
    """Random uint64 numbers, as keys of a permutation: a function of the arguments alone."""
    # numpy promises Philox's raw bits, not what `Generator` makes of them (NEP 19).
    key = np.array([seed, epoch], np.uint64)
    return np.random.Philox(key=key, counter=[0, 0, 0, _STREAMS[stream]]).random_raw(NUM_ROUNDS)


def _check_weights(weights: np.ndarray, num_examples: int) -> None:
    if weights.shape != (num_examples,):
        raise DataError(f"weights have shape {weights.shape} for {num_examples} examples.")
    if not (np.isfinite(weights).all() and (weights >= 0).all() and (weights > 0).any()):
        raise DataError("weights must be finite and not negative, and at least one positive.")


SEEDS = 2**32  # Distance of the seeds of sources: sources of one size get different orders.


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
        """Number of rounds of an epoch; each round has at least one example of each source."""
        passes = (share / size for share, size in zip(self.shares, self.sizes, strict=True))
        most = math.floor(self.num_examples * min(self.shares) / 2)
        wanted = math.ceil(self.num_examples * max(passes))
        return max(1, min(wanted, most, 2**62 // self.num_examples))  # products fit into int64

    def _draws(self, positions: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Each source with its places among these positions, and its own positions there."""
        num = self._num_rounds
        epochs, rest = np.divmod(positions, self.num_examples)
        rounds = epochs * num + ((rest + 1) * num - 1) // self.num_examples
        sums_of_shares = [*itertools.accumulate(self.shares)]
        for number in np.unique(rounds).tolist():
            edges = (number * self.num_examples // num, (number + 1) * self.num_examples // num)
            # How many examples of each source come before the round, and before the next one.
            before, after = (
                np.diff([int(share * edge) for share in sums_of_shares], prepend=0)
                for edge in edges
            )
            ends = np.cumsum(after - before)
            places = np.flatnonzero(rounds == number)
            keys = random_keys("mixture", self.seed, number)
            slots = permute(positions[places] - edges[0], edges[1] - edges[0], keys)
            sources = np.searchsorted(ends, slots, side="right")
            firsts = np.r_[0, ends]
            for source in np.unique(sources).tolist():
                is_here = sources == source
                draws = before[source] + slots[is_here] - firsts[source]
                yield source, places[is_here], draws


ExampleOrder = Order | MixtureOrder
