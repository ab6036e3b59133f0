"""The order of examples, of one source and of mixtures: a function of seed, epoch and position."""

import math
import pickle
import tracemalloc
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jddp.data import ArrayExamples, MixtureOrder, TrainBatches, source_of
from jddp.data.examples import Concatenated
from jddp.data.order import Order
from jddp.data.source import mixed_source
from jddp.ground.errors import ConfigError


def places(num_examples, *, seed=0, epoch=0, **options):
    positions = np.arange(num_examples) + epoch * num_examples
    return Order(num_examples, seed, **options).examples_at(positions)


@settings(max_examples=100)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_a_shuffled_epoch_is_a_permutation_of_any_number_of_examples(num_examples, seed, epoch):
    got = np.sort(places(num_examples, seed=seed, epoch=epoch))
    np.testing.assert_array_equal(got, np.arange(num_examples))


def test_all_permutations_are_equally_frequent():
    found = np.array([places(5, seed=seed) for seed in range(4000)])
    _, counts = np.unique(found, axis=0, return_counts=True)
    num_permutations = math.factorial(5)
    expected, freedom = len(found) / num_permutations, num_permutations - 1
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert len(counts) == num_permutations
    # Five standard deviations, of seeds that are fixed; with eight rounds it is six.
    assert abs(chi_squared - freedom) < 5 * math.sqrt(2 * freedom)


def test_a_billion_examples_need_no_table():
    tracemalloc.start()
    taken = Order(10**9, seed=0).examples_at(np.arange(128) + 10**12)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(taken)) == 128
    assert taken.max() > 9 * 10**8
    assert peak < 2**20


def test_epochs_and_seeds_differ_and_unshuffled_data_and_equal_weights_keep_the_order():
    assert (places(50) != places(50, epoch=1)).any()
    assert (places(50) != places(50, seed=1)).any()
    np.testing.assert_array_equal(places(100, weights=np.full(100, 0.3)), places(100))
    np.testing.assert_array_equal(places(4, shuffle=False, epoch=1), np.arange(4))


@settings(max_examples=50)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.integers(0, 2**63), st.booleans())
def test_weights_are_kept_in_every_epoch_to_the_next_whole_number(weights, seed, shuffle):
    weights = np.array(weights) + (sum(weights) < 1e-3)
    wanted = weights / weights.sum() * len(weights)
    for epoch in range(2):
        taken = places(len(weights), seed=seed, epoch=epoch, weights=weights, shuffle=shuffle)
        counts = np.bincount(taken, minlength=len(weights))
        assert (np.abs(counts - wanted) < 1 + 1e-9).all()
        assert (counts[weights == 0] == 0).all()


def test_what_augmentation_draws_depends_on_seed_epoch_and_example_alone():
    order = Order(1000, seed=0)
    positions = np.arange(2000)
    unshuffled = Order(1000, seed=0, shuffle=False).uniform(positions, 3)
    assert len(np.unique(unshuffled, axis=0)) == 2000
    for batch in np.split(positions, 40):
        examples = order.examples_at(batch) + 1000 * (batch // 1000)
        np.testing.assert_array_equal(order.uniform(batch, 3), unshuffled[examples])
    assert (Order(1000, seed=1, shuffle=False).uniform(positions, 3) != unshuffled).all()
    # Means and correlations of 2000 uniform numbers, to five standard deviations.
    np.testing.assert_allclose(unshuffled.mean(0), 0.5, atol=0.033)
    np.testing.assert_allclose(np.corrcoef(unshuffled.T) - np.eye(3), 0, atol=0.11)


def test_an_example_that_its_weight_repeats_is_augmented_in_another_way_each_time():
    order = Order(100, 0, weights=np.r_[50.0, np.ones(50), np.zeros(49)])
    draws = order.uniform(np.arange(300), 3)
    assert np.count_nonzero(order.examples_at(np.arange(300)) == 0) == 150
    assert len(np.unique(draws)) == draws.size


CASES = [
    ((7, 40, 3), (1.0, 1.0, 2.5)),
    ((12,), (2.0,)),
    ((2, 300, 60), (0.6, 0.395, 0.005)),
    ((3, 2, 5, 1, 2), (1.0, 1.7, 2.3, 1.1, 1.3)),
]


@pytest.mark.parametrize(("sizes", "weights"), CASES)
def test_shares_are_exact_to_one_example_and_a_source_is_taken_evenly(sizes, weights):
    order = MixtureOrder(sizes, weights, seed=3)
    size, exact = order.num_examples, [Fraction(str(x)) for x in weights]
    assert size == sum(sizes)
    taken = np.zeros(size, int)
    for epoch in range(1, 40):
        examples = order.examples_at(np.arange((epoch - 1) * size, epoch * size))
        counts = np.bincount(examples, minlength=size)
        taken += counts
        sources = zip(*(np.split(x, np.cumsum(sizes)[:-1]) for x in (counts, taken)), strict=True)
        for (now, so_far), weight in zip(sources, exact, strict=True):
            quota = size * weight / sum(exact)
            assert abs(int(now.sum()) - quota) < 2
            assert abs(int(so_far.sum()) - epoch * quota) < 1
            assert so_far.max() - so_far.min() <= 1


def test_any_position_is_found_by_itself_and_seeds_and_sources_differ():
    order = MixtureOrder((50, 50), (0.5, 0.5), seed=1)
    positions = np.random.default_rng(0).permutation(350)
    one_by_one = [order.examples_at(np.array([p]))[0] for p in positions]
    np.testing.assert_array_equal(order.examples_at(positions), one_by_one)
    draws = order.uniform(positions, 2)
    assert draws.shape == (350, 2)
    assert len(np.unique(draws)) == draws.size  # also of an example's later passes
    np.testing.assert_array_equal(draws[3], order.uniform(positions[3:4], 2)[0])
    assert (MixtureOrder((50, 50), (0.5, 0.5), seed=2).examples_at(positions) != one_by_one).any()
    epoch = order.examples_at(np.arange(100))
    assert [x for x in epoch if x < 50] != [x - 50 for x in epoch if x >= 50]
    large = MixtureOrder((2**33, 3), (1 / 3, 2 / 3), seed=0)
    far = 10**6 * large.num_examples
    assert large.examples_at(np.arange(far, far + 8)).max() <= 2**33 + 2


def test_wrong_weights_of_a_mixture_are_refused():
    for weights, message in (
        ((1.0,), "each source needs one"),
        ((1.0, float("inf")), "positive and finite"),
        ((1.0, 0.1), "less than one example in an epoch of 8"),
    ):
        with pytest.raises(ConfigError, match=message):
            MixtureOrder((4, 4), weights, seed=0)


def test_batches_of_a_mixture_resume_at_their_position():
    examples = Concatenated([ArrayExamples({"x": x}) for x in np.split(np.arange(13), [9])])

    order = MixtureOrder((9, 4), (0.4, 0.6), seed=5)
    want = order.examples_at(np.arange(72)).reshape(12, 6)
    shares = [
        TrainBatches(examples, global_batch_size=6, order=order, process_index=i, num_processes=2)
        for i in range(2)
    ]
    shares = [pickle.loads(pickle.dumps(share)) for share in shares]
    for share in shares:
        share.set_state({"position": 5 * 6})
    for step in range(5, 12):
        rows = np.concatenate([next(share)["x"] for share in shares])
        np.testing.assert_array_equal(rows, want[step])


def test_a_mixture_of_different_data_is_refused_and_names_both():
    narrow, wide = (source_of("s", {"x": x}, {"x": x}) for x in (np.ones((4, 2)), np.ones((4, 3))))
    with pytest.raises(ConfigError, match=r"one holds x \(2,\) .* and two x \(3,\)"):
        mixed_source({"one": narrow, "two": wide}, [1, 1])
    with pytest.raises(ConfigError, match=r"two x .* tokenizer 'other.json'"):
        mixed_source({"one": narrow, "two": replace(narrow, tokenizer="other.json")}, [1, 1])


def test_a_mixture_trains_on_shares_and_is_tested_on_all():
    sources = {
        name: source_of(name, {"x": x}, {"x": x[:2]})
        for name, x in {"one": np.arange(4.0), "two": np.arange(4.0, 16)}.items()
    }
    data = mixed_source(sources, [3, 1]).load()
    assert (len(data.train), len(data.test)) == (16, 4)
    assert (data.order(0).examples_at(np.arange(16)) < 4).sum() == 12
    assert "0.75 of one (3 times), 0.25 of two (0.333 times): 16 train / 4" in data.description
    for rows, want in (([3, 0, 1], [5, 0, 1]), ([], [])):
        assert data.test.take(np.array(rows, int))["x"].tolist() == want


def test_bytes_of_a_token_are_known_of_a_mixture_if_all_sources_have_as_many():
    rows = {"tokens": np.zeros((4, 3), np.int32)}
    for other, want in ((1, 1), (4.2, None), (None, None)):
        one, two = (replace(source_of("x", rows, rows), bytes_per_token=x) for x in (1, other))
        assert mixed_source({"one": one, "two": two}, [1, 1]).bytes_per_token == want
