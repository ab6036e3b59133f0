"""Pairwise sums, in one order on any number of devices: neighbours, then sums of neighbours.

Floating-point addition is not associative, so a sum that is to be bitwise identical is added up in
one order. In a tree of neighbours a run of 2^k numbers, beginning where 2^k divides, is a branch: a
device that has such a run can add it up alone, and the sums of runs are added in the same tree.

    0 1 2 3 4 5  ─►  01 23 45  ─►  0123 45  ─►  012345
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jddp.typing import PyTree


def add_in_pairs(rows: jax.Array) -> jax.Array:
    """Adds up the rows of an array."""
    while len(rows) > 1:
        paired = len(rows) // 2 * 2
        # A last row without a neighbour is added one level higher: padding with zeros would turn -0
        # into 0.
        rows = jnp.concatenate([rows[:paired:2] + rows[1:paired:2], rows[paired:]])
    return rows[0]


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
