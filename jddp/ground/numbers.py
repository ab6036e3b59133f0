"""Sums in one order, whatever the number of devices."""

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
