"""Means stay exact however the valid entries are spread."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jddp
from jddp.ground.errors import ConfigError
from jddp.ground.typing import RESERVED
from jddp.modules.metrics import (
    Metric,
    Totals,
    count_valid_rows,
    divide,
    mean_tree,
    sum_over_replicas,
    weigh,
)

ROWS, TABLE = jnp.array([1.0, 2.0, 4.0]), jnp.ones((2, 3))
MASKED = {
    "entries": (ROWS, [1, 0, 1], (5, 2)),
    "fractions": (ROWS, [0.5, 0, 1.0], (5, 2)),
    "a NaN does no harm": (jnp.array([1.0, jnp.nan]), [True, False], (1, 1)),
    "whole rows of tokens": (TABLE, [True, False], (3, 3)),
}


def pair(sum_):
    return float(sum_.total), float(sum_.count)


@pytest.mark.parametrize("losses, mask, want", MASKED.values(), ids=MASKED)
def test_a_mask_keeps_entries_out_of_total_and_count_and_weighs_none(losses, mask, want):
    assert pair(weigh(losses, {}, mask=jnp.array(mask))["loss"]) == want


def test_a_metric_of_rows_counts_where_its_row_has_a_valid_token():
    mask = jnp.array([[1, 0], [0, 0], [1, 1]])
    assert float(count_valid_rows(mask)) == 2
    sums = weigh(jnp.ones((3, 2)), {"row": jnp.array([5.0, 7.0, 9.0])}, mask=mask)
    assert (pair(sums["loss"]), pair(sums["row"])) == ((3, 3), (14, 2))


def test_a_shape_that_does_not_align_with_the_mask_is_refused():
    for shape in ((4,), (3, 5), (2, 3)):
        with pytest.raises(ConfigError, match=r"'loss' has shape .* leading dims"):
            weigh(jnp.ones(shape), {}, mask=jnp.ones((3, 2)))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", RESERVED)
def test_a_metric_may_not_have_a_name_of_a_record_in_training_and_evaluation(name, train):
    for metric in (jnp.ones(2), Metric(jnp.ones(2), lambda total, count: total)):
        with pytest.raises(ConfigError, match=f"'{name}'"):
            weigh(jnp.ones(2), {name: metric}, train=train)


def test_a_tree_is_divided_to_rounding_keeps_its_dtypes_and_a_mean_over_nothing_is_zero():
    tree = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2, jnp.complex64)}
    got = mean_tree(tree, jnp.float32(0))
    assert {k: x.dtype for k, x in got.items()} == {k: x.dtype for k, x in tree.items()}
    np.testing.assert_array_equal(mean_tree(tree, jnp.float32(4))["b"], [0.25, 0.25])
    assert float(divide(jnp.float32(0), jnp.float32(0))) == 0
    totals = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.float32)
    for count in (7.0, 41.0, 96.0):
        got = mean_tree(totals, jnp.float32(count))
        # Two roundings here and one there, of 2^-24 each.
        np.testing.assert_allclose(got, totals / count, rtol=3 * 2**-24)
    np.testing.assert_array_equal(mean_tree(totals, jnp.float32(64)), totals / 64)


def test_totals_of_many_batches_are_exact_where_float32_is_not_and_nan_of_nothing_valid():
    totals, nothing = Totals(), Totals()
    for _ in range(3):
        totals.add({"loss": weigh(jnp.full(1, 2.0**24), {})["loss"]})
        totals.add(weigh(jnp.ones(1), {}))
    assert totals.values()["loss"] == (3 * 2**24 + 3) / 6
    nothing.add(weigh(jnp.ones(2), {}, mask=jnp.zeros(2)))
    assert np.isnan(nothing.values()["loss"])


def reported(batches, **options):
    """Totals of some batches of (losses, metric, mask)."""
    totals = Totals()
    for losses, metric, mask in batches:
        totals.add(weigh(losses, {"metric": metric}, mask=mask, train=False, **options))
    return totals.values()["metric"]


def test_what_is_computed_comes_from_the_sums_of_all_that_counts():
    losses = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, jnp.nan]])
    mask = jnp.array([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    metric, first = (Metric(x, lambda a, b: np.exp(a / b)) for x in (losses, losses[:1]))
    assert reported([(losses, metric, mask)] * 2) == pytest.approx(np.exp(3.0))
    assert reported([(losses[:1], first, None)]) == pytest.approx(np.exp(2.0))
    metric = Metric(jnp.array([1, 2, 4]), lambda total, count: [total, count])
    assert reported([(jnp.float32(3), metric, None)]) == [7, 3]  # beside a scalar loss
    values = {"a": jnp.ones(2), "b": TABLE}  # The entries that count are those of the first.
    metric = Metric(values, lambda sums, count: [sums["a"], sums["b"], count])
    assert reported([(TABLE, metric, TABLE)]) == [2, 6, 2]
    metric = Metric(jnp.array([3, 4]), lambda total, count: [total, count])  # of rows with a token
    assert reported([(TABLE[:, :2], metric, jnp.array([[1.0, 0.0], [0.0, 0.0]]))]) == [3, 1]
    assert np.isnan(reported([(ROWS, Metric(ROWS, lambda *_: 1 / 0), jnp.zeros(3))]))


WHOLE = {
    "each fits and their sum does not": np.full(64, 1_500_000_000, np.int32),
    "above the largest int32": np.full(64, 3_000_000_000, np.uint32),
    "the largest and the smallest": np.array([2**31 - 1, -(2**31), -(2**31)] * 50, np.int32),
    "carries at every row": np.random.default_rng(0).integers(-(2**31), 2**31, 4096, np.int32),
    "bytes": np.full(64, -128, np.int8),
    "unsigned bytes": np.full(64, 255, np.uint8),
    "bools": np.arange(64) % 3 == 0,
}


@pytest.mark.parametrize("values", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_whole_numbers_of_any_dtype_are_summed_as_numpy_sums_them_in_int64(values, num_replicas):
    mask = np.arange(len(values)) % 5 > 0

    def replica(x, mask):
        whole = {"n": Metric(x[:, None, None], lambda total, count: total)}
        masked = weigh(jnp.ones(len(x)), whole, mask=mask, train=False)["n"]
        sums = {"masked": masked, "all": weigh(jnp.float32(1), whole, train=False)["n"]}
        return sum_over_replicas(sums, axis="data")

    rows = jax.tree.map(lambda x: x.reshape(num_replicas, -1), (values, mask))
    sums = jax.jit(jax.vmap(replica, axis_name="data"))(*rows)
    totals = Totals()
    for _ in range(3):
        totals.add(jax.tree.map(lambda x: x[0], sums))
    want = {"masked": values[mask], "all": values}
    found = totals.values()
    assert found == {name: [[3 * x.sum(dtype=np.int64)]] for name, x in want.items()}


def test_values_of_a_metric_begin_with_the_dims_of_the_losses_or_have_fewer():
    """Confusions of rows, beside losses of tokens, were summed over their first class."""
    losses, values = jnp.ones((8, 3)), {"pairs": jnp.ones((8, 4, 4), int)}
    metric = Metric(values, lambda sums, count: sums["pairs"])
    for found in (jnp.ones(8), jddp.Mean(losses.sum(1), losses.sum(1)), jnp.float32(1)):
        assert reported([(found, metric, None)]) == np.full((4, 4), 8).tolist()
    for wrong in (values, jnp.ones((8, 4)), [losses, values["pairs"]], jnp.ones((8, 4, 3))):
        with pytest.raises(ConfigError, match="'metric' has shape .*the losses have"):
            reported([(losses, Metric(wrong, lambda total, count: total), None)])
    for right, want in ((jnp.ones(8), 8), (losses, 24), (jnp.ones((8, 3, 2)), [24, 24])):
        assert reported([(losses, Metric(right, lambda total, count: total), None)]) == want


def test_a_metric_without_rows_or_numbers_is_refused_by_its_name():
    without_rows = jnp.float32(1), {}, {"a": jnp.ones(2), "b": 3.0}
    no_numbers = {"f1": 1.0}, "text", 1j, None
    for values, computed, message in (
        *((values, 0.0, "'metric' holds a scalar, or nothing") for values in without_rows),
        *((jnp.ones(2), x, "Metric 'metric': compute returned") for x in no_numbers),
    ):
        metric = Metric(values, lambda *_, computed=computed: computed)
        with pytest.raises(ConfigError, match=message):
            reported([(jnp.ones(2), metric, None)])
