"""A view is how much of the mean gradient a replica holds: all, a shard, or one of its own."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from two_replicas import AXIS, on_two

from jddp.engine.view import View, view_of_shards

WHOLE = np.float32([[1, 2, 3, 4]] * 2)


def test_a_shard_is_cut_out_of_the_whole_and_the_whole_gathered_from_shards():
    def replica(grads):
        shard = View(AXIS).shards(grads)
        gather = functools.partial(lax.all_gather, axis_name=AXIS, tiled=True)
        return shard, view_of_shards(AXIS).whole(shard, gather)

    shards, whole = on_two(replica, WHOLE)
    assert (shards.tolist(), whole.tolist()) == ([[1, 2], [3, 4]], WHOLE.tolist())


def test_what_is_a_shard_or_whole_already_is_left_as_it_is():
    assert (on_two(view_of_shards(AXIS).shards, WHOLE) == WHOLE).all()
    for view in (View(AXIS), View(AXIS, is_mean=False)):
        assert (on_two(lambda x, view=view: view.whole(x, jnp.negative), WHOLE) == WHOLE).all()


@pytest.mark.parametrize(
    "view, differs, norms, metrics",
    [
        (View(AXIS), False, [3, 4], [3, 4]),
        (view_of_shards(AXIS), True, [5, 5], [3, 4]),
        (View(AXIS, is_mean=False), True, [3, 4], [3.5, 3.5]),
    ],
)
def test_norms_and_numbers_to_report_are_taken_by_the_view(view, differs, norms, metrics):
    numbers = np.float32([3, 4])
    got = on_two(lambda x: (view.norm([x]), view.metric(x)), numbers)
    assert [x.tolist() for x in got] == [norms, metrics]
    assert view.differs == differs
