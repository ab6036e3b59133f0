"""Sums in one order, whoever adds them."""

import jax.numpy as jnp
import numpy as np
import pytest

from jddp.reduce.shards import add_in_pairs
from jddp.workbench.logical_replicas import sum_in_pairs


@pytest.mark.parametrize("num", [1, 2, 3, 6, 8, 12])
def test_however_many_carry_numbers_their_sum_is_the_same_to_the_bit(num):
    rng = np.random.default_rng(num)
    values = (rng.normal(size=num) * 10.0 ** rng.integers(-4, 4, num)).astype(np.float32)
    sums = set()
    for carriers in (n for n in range(1, num + 1) if num % n == 0):
        rows = [
            sum_in_pairs(lambda i, part=part: (part[i], i), len(part))[0]
            for part in jnp.split(jnp.asarray(values), carriers)
        ]
        sums.add(np.asarray(add_in_pairs(jnp.concatenate(rows))).tobytes())
    assert len(sums) == 1
    assert num < 12 or sums != {np.cumsum(values)[-1].tobytes()}  # one after the other


def test_a_share_that_is_a_power_of_two_leaves_one_row():
    for num, rows in {8: 1, 12: 3, 6: 3, 5: 5}.items():
        totals, _ = sum_in_pairs(lambda i: (i.astype(jnp.float32), i), num)
        assert totals.shape == (rows,)
