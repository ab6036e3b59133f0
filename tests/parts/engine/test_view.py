"""A view is how much of the mean gradient a replica holds: all, a shard, or one of its own."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from two_replicas import AXIS, on_two

from jddp.engine.view import OwnGradient, ShardOfMean, WholeMean

WHOLE = np.float32([[1, 2, 3, 4]] * 2)


def test_a_shard_is_cut_out_of_the_whole_and_the_whole_gathered_from_shards():
    def replica(grads):
        shard = WholeMean(AXIS).shards(grads)
        return shard, ShardOfMean(AXIS).whole(shard, lambda x: lax.all_gather(x, AXIS, tiled=True))

    shards, whole = on_two(replica, WHOLE)
    assert (shards.tolist(), whole.tolist()) == ([[1, 2], [3, 4]], WHOLE.tolist())


def test_what_is_a_shard_or_whole_already_is_left_as_it_is():
    assert (on_two(ShardOfMean(AXIS).shards, WHOLE) == WHOLE).all()
    for view in (WholeMean(AXIS), OwnGradient(AXIS)):
        assert (on_two(lambda x, view=view: view.whole(x, jnp.negative), WHOLE) == WHOLE).all()


@pytest.mark.parametrize(
    "view, differs, norms, metrics",
    [
        (WholeMean, False, [3, 4], [3, 4]),
        (ShardOfMean, True, [5, 5], [3, 4]),
        (OwnGradient, True, [3, 4], [3.5, 3.5]),
    ],
)
def test_norms_and_numbers_to_report_are_taken_by_the_view(view, differs, norms, metrics):
    view, numbers = view(AXIS), np.float32([3, 4])
    got = on_two(lambda x: (view.norm([x]), view.metric(x)), numbers)
    assert [x.tolist() for x in got] == [norms, metrics]
    assert view.differs == differs
