"""Pairwise sums, in one order on any number of devices: neighbours, then sums of neighbours.

Floating-point addition is not associative, so a sum that is to be bitwise identical is added up in
one order. In a tree of neighbours a run of 2^k numbers, beginning where 2^k divides, is a branch: a
device that has such a run can add it up alone, and the sums of runs are added in the same tree.

    0 1 2 3 4 5  ─►  01 23 45  ─►  0123 45  ─►  012345
"""

import jax
import jax.numpy as jnp


def add_in_pairs(rows: jax.Array) -> jax.Array:
    """Adds up the rows of an array."""
    while len(rows) > 1:
        paired = len(rows) // 2 * 2
        # A last row without a neighbour is added one level higher: padding with zeros would turn -0
        # into 0.
        rows = jnp.concatenate([rows[:paired:2] + rows[1:paired:2], rows[paired:]])
    return rows[0]
