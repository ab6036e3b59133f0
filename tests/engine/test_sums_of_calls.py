"""Sums in one order, whoever adds them."""

import jax.numpy as jnp
import numpy as np
import pytest

from jddp.reduce.shards import add_in_pairs
from jddp.workbench.logical_replicas import sum_in_pairs


def numbers(num):
    """Of many sizes, so that each order of adding gives another sum."""
    rng = np.random.default_rng(num)
    return (rng.normal(size=num) * 10.0 ** rng.integers(-4, 4, num)).astype(np.float32)


def tree_of(values):
    """The same tree, in Python."""
    while len(values) > 1:
        pairs = [a + b for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + ([values[-1]] if len(values) % 2 else [])
    return values[0]


@pytest.mark.parametrize("num", [1, 2, 3, 6, 8, 12])
def test_however_many_carry_them_the_sum_is_the_same_to_the_bit(num):
    values = numbers(num)
    want = tree_of([*values])
    assert num < 12 or want != np.cumsum(values)[-1]  # One after the other is another sum.
    for carriers in (n for n in range(1, num + 1) if num % n == 0):
        share = num // carriers
        rows, kept = [], []
        for carrier in range(carriers):
            own = jnp.asarray(values[carrier * share : (carrier + 1) * share])
            totals, places = sum_in_pairs(lambda i, own=own: (own[i], i), share)
            rows.append(totals)
            kept += [carrier * share + int(i) for i in places]
        assert kept == list(range(num))
        assert np.asarray(add_in_pairs(jnp.concatenate(rows))).tobytes() == want.tobytes()


def test_a_share_that_is_a_power_of_two_leaves_one_row():
    for num, rows in {8: 1, 12: 3, 6: 3, 5: 5}.items():
        totals, _ = sum_in_pairs(lambda i: (i.astype(jnp.float32), i), num)
        assert totals.shape == (rows,)
