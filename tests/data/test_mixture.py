"""Mixtures: exact shares at any position, every example of a source equally often."""

import dataclasses
import pickle
from fractions import Fraction

import numpy as np
import pytest

from jddp.data import ArrayExamples, MixtureOrder, TrainBatches, source_of
from jddp.data.examples import Concatenated
from jddp.data.source import mixed_source
from jddp.ground.errors import ConfigError

CASES = [
    ((5, 11), (0.3, 0.7)),
    ((7, 40, 3), (1.0, 1.0, 2.5)),
    ((100, 23, 9, 64), (0.1, 0.2, 0.3, 0.4)),
    ((12,), (2.0,)),
    ((2, 300, 60), (0.6, 0.395, 0.005)),
    ((3, 2, 5, 1, 2), (1.0, 1.7, 2.3, 1.1, 1.3)),
]


def sources_at(order, positions):
    return np.searchsorted(np.cumsum(order.sizes), order.examples_at(positions), side="right")


@pytest.mark.parametrize(("sizes", "weights"), CASES)
def test_shares_are_exact_to_one_example_in_all_epochs_so_far(sizes, weights):
    order = MixtureOrder(sizes, weights, seed=3)
    size = order.num_examples
    assert size == sum(sizes)
    exact = [Fraction(str(x)) for x in weights]
    taken = np.zeros(len(sizes), int)
    for epoch in range(1, 40):
        sources = sources_at(order, np.arange((epoch - 1) * size, epoch * size))
        counts = np.bincount(sources, minlength=len(sizes))
        taken += counts
        for source, weight in enumerate(exact):
            quota = size * weight / sum(exact)
            assert abs(int(counts[source]) - quota) < 2
            assert abs(int(taken[source]) - epoch * quota) < 1


@pytest.mark.parametrize(("sizes", "weights"), CASES)
def test_after_an_epoch_all_examples_of_a_source_were_taken_equally_often(sizes, weights):
    order = MixtureOrder(sizes, weights, seed=0)
    for num_epochs in (1, 2, 7):
        examples = order.examples_at(np.arange(num_epochs * order.num_examples))
        counts = np.bincount(examples, minlength=sum(sizes))
        for part in np.split(counts, np.cumsum(sizes)[:-1]):
            assert part.max() - part.min() <= 1


def test_a_weight_is_the_decimal_number_that_is_written():
    order = MixtureOrder((5, 5), (0.6, 0.4), seed=0)
    assert np.bincount(sources_at(order, np.arange(10))).tolist() == [6, 4]


def test_any_position_is_found_by_itself_and_seeds_and_sources_differ():
    order = MixtureOrder((50, 50), (0.5, 0.5), seed=1)
    positions = np.random.default_rng(0).permutation(350)
    one_by_one = [order.examples_at(np.array([p]))[0] for p in positions]
    np.testing.assert_array_equal(order.examples_at(positions), one_by_one)
    draws = order.uniform(positions, 2)
    assert draws.shape == (350, 2)
    assert len(np.unique(draws)) == draws.size  # also of an example's later passes
    np.testing.assert_array_equal(draws[3], order.uniform(positions[3:4], 2)[0])
    other = MixtureOrder((50, 50), (0.5, 0.5), seed=2)
    assert (other.examples_at(positions) != one_by_one).any()
    first, second = (np.arange(100)[np.arange(100) // 50 == i] for i in (0, 1))
    epoch = order.examples_at(np.arange(100))
    assert [x for x in epoch if x in first] != [x - 50 for x in epoch if x in second]


def test_far_positions_are_exact():
    order = MixtureOrder((2**33, 3), (1 / 3, 2 / 3), seed=0)
    far = 10**6 * order.num_examples
    assert order.examples_at(np.arange(far, far + 8)).max() <= 2**33 + 2


@pytest.mark.parametrize(
    ("sizes", "weights", "said"),
    [
        ((4, 4), (1.0,), "each source needs one"),
        ((4, 4), (1.0, 0.0), "positive and finite"),
        ((4, 4), (1.0, float("inf")), "positive and finite"),
        ((4, 4), (1.0, 0.1), "less than one example in an epoch of 8"),
    ],
)
def test_wrong_weights_are_refused(sizes, weights, said):
    with pytest.raises(ConfigError, match=said):
        MixtureOrder(sizes, weights, seed=0)


def parts(*sizes):
    firsts = np.cumsum(sizes) - sizes
    return [
        ArrayExamples({"x": np.arange(first, first + size)})
        for first, size in zip(firsts, sizes, strict=True)
    ]


def test_joined_examples_are_taken_in_the_order_that_is_asked_for():
    joined = Concatenated(parts(3, 1, 4), ["a", "b", "c"])
    assert len(joined) == 8
    for indices in ([7, 0, 3, 2, 4, 0], [], [3]):
        np.testing.assert_array_equal(joined.take(np.array(indices, int))["x"], indices)
    assert joined.places(np.array([7, 0, 3])) == ["c 3", "a 0", "b 0"]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_batches_of_a_mixture_resume_at_their_position(num_processes):
    def batches(**share):
        order = MixtureOrder((9, 4), (0.4, 0.6), seed=5)
        examples = Concatenated(parts(9, 4), ["a", "b"])
        return TrainBatches(examples, global_batch_size=6, order=order, **share)

    whole = [batch["x"] for batch, _ in zip(batches(), range(12), strict=False)]
    shares = [
        pickle.loads(pickle.dumps(batches(process_index=i, num_processes=num_processes)))
        for i in range(num_processes)
    ]
    for share in shares:
        share.set_state({"position": 5 * 6})
    for step in range(5, 12):
        rows = np.concatenate([next(share)["x"] for share in shares])
        np.testing.assert_array_equal(rows, whole[step])


def test_a_mixture_of_different_data_is_refused_and_names_both():
    narrow, wide = (source_of("s", {"x": x}, {"x": x}) for x in (np.ones((4, 2)), np.ones((4, 3))))
    with pytest.raises(ConfigError, match=r"one holds x \(2,\) float32, and two x \(3,\) float32"):
        mixed_source({"one": narrow, "two": wide}, [1, 1])


def test_a_mixture_trains_on_shares_and_is_tested_on_all():
    sources = {
        name: source_of(name, {"x": x}, {"x": x[:2]})
        for name, x in {"one": np.arange(4.0), "two": np.arange(4.0, 16)}.items()
    }
    data = mixed_source(sources, [3, 1]).load()
    assert (len(data.train), len(data.test)) == (16, 4)
    assert (data.order(0).examples_at(np.arange(16)) < 4).sum() == 12
    assert "0.75 of one (3 times), 0.25 of two (0.333 times): 16 train / 4" in data.description
    assert data.test.take(np.arange(4))["x"].tolist() == [0, 1, 4, 5]


def test_bytes_of_a_token_are_known_of_a_mixture_if_all_sources_have_as_many():
    rows = {"tokens": np.zeros((4, 3), np.int32)}

    def mixed(*known):
        sources = {
            str(i): dataclasses.replace(source_of("x", rows, rows), bytes_per_token=x)
            for i, x in enumerate(known)
        }
        return mixed_source(sources, [1] * len(known)).bytes_per_token

    assert mixed(1.0, 1.0) == 1.0
    assert mixed(1.0, 4.2) is None
    assert mixed(1.0, None) is None
