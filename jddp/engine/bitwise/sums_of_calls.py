"""Pairwise sums of the results of a function's calls, made while the calls run in turn.

A device adds up its part of the tree of `jddp.reduce.shards`, and the rows that it is left with
continue the sum over all devices.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jddp.ground.typing import PyTree


def sum_in_pairs(
    function: Callable[[jax.Array], tuple[PyTree, PyTree]], num: int
) -> tuple[PyTree, PyTree]:
    """Adds up the first results of `function(0)` to `function(num - 1)`, one after the other.

    `function` is traced once; of its first results there are 2 log2(num) at a time.

    Args:
      function: Function of a number that returns a tree to add up, and a tree to keep as it is.
      num: Number of calls.

    Returns:
      Rows: sums of as many as the largest power of two that divides `num`; `add_in_pairs`
      completes the sum. And all second results, stacked.
    """
    # The largest power of two that divides `num`. The numbers of a device begin at a multiple of
    # `num`, so a run of this length is a branch of the tree on every device; a longer one need not
    # be.
    block = num & -num

    def branch(start: jax.Array, size: int) -> tuple[PyTree, PyTree]:
        if size == 1:
            total, kept = function(start)
            return total, jax.tree.map(lambda x: x[None], kept)
        # Two halves in a loop, and not a running sum, which is another order. A loop also makes XLA
        # compile the function once, in one form, whatever the number of calls.
        half = size // 2
        totals, kept = lax.map(lambda i: branch(start + i * half, half), jnp.arange(2))
        return jax.tree.map(lambda x: x[0] + x[1], totals), _in_one(kept)

    totals, kept = lax.map(lambda i: branch(i * block, block), jnp.arange(num // block))
    return totals, _in_one(kept)


def _in_one(tree: PyTree) -> PyTree:
    """Merges the first two dims."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
