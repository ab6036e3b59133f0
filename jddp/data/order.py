"""Which example stands at which position of a run: a pure function of (seed, epoch, position).

A run reads positions 0, 1, 2, ... for ever. Position `p` lies in epoch `p // num_examples`, every
epoch is a permutation of all examples, and epochs follow each other without a gap. Nothing here
depends on batch sizes, processes or devices, so a run keeps its order when any of them changes,
and resumes at any position without replaying the ones before.

Random numbers come from Philox, which is counter-based: a stream is named, not advanced to. Only
its raw bits are used to shuffle, since numpy promises those, and not what `Generator` makes of
them, to stay the same from version to version (NEP 19).

References:
  Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
  NEP 19, "Random Number Generator Policy", https://numpy.org/neps/nep-0019-rng-policy.html
"""

from functools import lru_cache
from typing import Literal

import numpy as np

_STREAMS = {"order": 0, "augment": 1}


def random_bits(stream: Literal["order", "augment"], seed: int, index: int) -> np.random.Philox:
    """The source of random bits named (stream, seed, index), at its beginning."""
    return np.random.Philox(key=[seed, index], counter=[0, 0, 0, _STREAMS[stream]])


@lru_cache(maxsize=4)
def epoch_order(num_examples: int, *, seed: int, epoch: int) -> np.ndarray:
    """The permutation of the examples that is read in one epoch (read-only)."""
    keys = random_bits("order", seed, epoch).random_raw(num_examples)
    order = np.argsort(keys, kind="stable")
    order.flags.writeable = False
    return order


def examples_at(positions: np.ndarray, *, num_examples: int, seed: int | None) -> np.ndarray:
    """The indices of the examples at these positions of the run.

    Args:
      positions: Positions of a run, counted from 0, in any order.
      num_examples: Examples of one epoch.
      seed: Names the permutations; `None` reads every epoch in the order of the data.
    """
    epochs, indices = np.divmod(positions, num_examples)
    if seed is None:
        return indices
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = epoch_order(num_examples, seed=seed, epoch=int(epoch))[indices[here]]
    return indices
