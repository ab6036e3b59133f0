"""A reduction gives every replica the mean of all, in whatever form gradients are sent."""

import jax
import numpy as np
import pytest
from two_replicas import on_two, reduction_of

from jddp.reduce.backward import Finished

# Of two replicas; "c" has more bytes than a bucket.
GRADS = {
    "a": np.float32([2, 4]),
    "b": np.float32([[1, 3, 5], [3, 5, 7]]),
    "c": np.float32([[*range(20)], [*range(2, 22)]]),
}
MEAN = {"a": 3.0, "b": [2, 4, 6], "c": [*range(1, 21)]}


@pytest.mark.parametrize("layout", ["leaf", "flat"])
def test_with_shards_a_replica_gets_its_shard_of_the_mean_and_gathers_the_rest(layout):
    reduction = reduction_of(layout, is_sharded=True)

    def replica(grads):
        plan = reduction.plan(grads)
        shards, _ = reduction(Finished(grads), (), plan)
        return shards, reduction.gather(shards, grads, plan)

    shards, whole = on_two(replica, GRADS)
    assert shards["b"].tolist() == [[2, 4], [6, 0]]  # the last with a zero of padding
    for name, want in MEAN.items():
        assert whole[name].tolist() == [want] * 2


def test_sums_of_logical_replicas_are_continued_and_divided_by_their_number():
    reduction = reduction_of(num=4)

    def replica(grads):
        rows = jax.tree.map(lambda x: x[None], grads)  # one sum of two replicas on each device
        return reduction(Finished(rows), (), reduction.plan(grads))[0]

    means = on_two(replica, GRADS)
    for name, want in MEAN.items():
        assert (2 * means[name]).tolist() == [want] * 2


def test_gradients_that_are_in_no_bucket_stay_as_they_are():
    reduction = reduction_of()

    def replica(grads):
        plan = reduction.plan(grads, [1, None, 2])
        assert plan.unused == ("b",)
        return reduction(Finished(grads), (), plan)[0]

    means = on_two(replica, GRADS)
    assert means["b"].tolist() == GRADS["b"].tolist()
    assert means["a"].tolist() == [3, 3]
