"""Bucket plans, and averages that do not depend on them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import P

import jddp
from jddp.errors import ConfigError
from jddp.reduce import compiler_options, plan_buckets, pmean_buckets, resolve_layout


def shape(size, dtype="float32"):
    return jax.ShapeDtypeStruct((size,), np.dtype(dtype))


def planned(sizes, *, bucket_bytes, first=None):
    """Buckets as leaf numbers counted in the order of reduction, as DDP's own tests count."""
    tree = [shape(*size) if isinstance(size, tuple) else shape(size) for size in reversed(sizes)]
    plan = plan_buckets(tree, bucket_bytes=bucket_bytes, first_bucket_bytes=first)
    return [[len(sizes) - 1 - leaf for leaf in bucket.leaves] for bucket in plan.buckets]


F32_F64 = [(50, "float32"), (25, "float64")] * 3


@pytest.mark.parametrize(
    "sizes, limits, buckets",
    [
        pytest.param([100, 200, 100, 50], {"bucket_bytes": 400}, [[0], [1], [2], [3]], id="BKT-1"),
        pytest.param(F32_F64, {"bucket_bytes": 400}, [[0, 2], [1, 3], [4], [5]], id="BKT-2"),
        pytest.param([10] * 4, {"first": 40, "bucket_bytes": 80}, [[0], [1, 2], [3]], id="BKT-3"),
        pytest.param(
            F32_F64, {"first": 200, "bucket_bytes": 400}, [[0], [1], [2, 4], [3, 5]], id="BKT-4"
        ),
    ],
)
def test_ddp_s_own_bucketing_cases_give_ddp_s_own_buckets(sizes, limits, buckets):
    assert planned(sizes, **limits) == buckets


def test_leaves_are_taken_last_to_first():
    tree = {"a": shape(10), "b": shape(10), "c": shape(10)}
    plan = plan_buckets(tree, bucket_bytes=80)
    assert [bucket.paths for bucket in plan.buckets] == [("c", "b"), ("a",)]


def test_a_leaf_larger_than_a_bucket_has_one_of_its_own():
    assert planned([10, 1000, 10], bucket_bytes=80) == [[0], [1], [2]]


def test_a_bucket_of_one_byte_holds_one_leaf():
    assert planned([3, 2, 1], bucket_bytes=1) == [[0], [1], [2]]


def test_an_empty_tree_needs_no_bucket():
    plan = plan_buckets({}, bucket_bytes=100)
    assert (len(plan), plan.wire_bytes) == (0, 0)
    assert "0 buckets" in str(plan)


def test_a_first_bucket_is_never_larger_than_the_others():
    assert planned([10, 10, 10], bucket_bytes=40, first=400) == [[0], [1], [2]]


def test_empty_leaves_travel_with_their_neighbours():
    assert planned([10, 0, 10], bucket_bytes=80) == [[0, 1, 2]]


@pytest.mark.parametrize("sizes", [{"bucket_bytes": 0}, {"bucket_bytes": 8, "first": -1}])
def test_sizes_that_are_not_positive_are_refused(sizes):
    with pytest.raises(ConfigError, match="at least one byte"):
        planned([1], **sizes)


@pytest.mark.parametrize("leaf", [3.0, np.arange(3), np.array([True])])
def test_what_cannot_be_averaged_is_refused_by_its_path(leaf):
    with pytest.raises(ConfigError, match="'layer/w'"):
        plan_buckets({"layer": {"w": leaf}}, bucket_bytes=100)


dtypes = st.sampled_from(["float32", "bfloat16", "float16", "complex64"])
shapes = st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), dtypes), max_size=12)


@given(shapes, st.integers(1, 400), st.integers(1, 400))
def test_every_leaf_stands_once_in_a_bucket_of_its_dtype_within_the_limit(leaves, cap, first):
    tree = [jax.ShapeDtypeStruct(tuple(dims), jnp.dtype(dtype)) for dims, dtype in leaves]
    plan = plan_buckets(tree, bucket_bytes=cap, first_bucket_bytes=first)
    assert sorted(i for bucket in plan.buckets for i in bucket.leaves) == list(range(len(tree)))
    assert plan.wire_bytes == sum(x.size * x.dtype.itemsize for x in tree)
    seen = set()
    for bucket in plan.buckets:
        assert {tree[i].dtype for i in bucket.leaves} == {bucket.dtype}
        assert list(bucket.leaves) == sorted(bucket.leaves, reverse=True)
        limit = cap if bucket.dtype in seen else min(first, cap)
        filled = [x for x in bucket.leaves if tree[x].size]
        assert bucket.bytes <= limit or len(filled) == 1
        seen.add(bucket.dtype)
    ends = [bucket.leaves[-1] for bucket in plan.buckets]
    assert ends == sorted(ends, reverse=True)


def whole_numbers(num_replicas, seed=0):
    """Gradients whose sums over replicas are exact in any order, one row for each replica."""
    rng = np.random.default_rng(seed)
    sizes = {"w": (3, 4), "b": (4,), "scalar": (), "empty": (0, 2), "big": (50,)}
    tree = {k: rng.integers(-8, 8, (num_replicas, *s)).astype(np.float32) for k, s in sizes.items()}
    return {**tree, "half": tree["b"].astype(jnp.bfloat16)}


def averaged(mesh, tree, **options):
    def replica(local):
        local = jax.tree.map(lambda x: x[0], local)
        plan = plan_buckets(local, bucket_bytes=options["bucket_bytes"])
        return pmean_buckets(local, plan, axis="data", layout=options["layout"])

    mapped = jax.shard_map(replica, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    return jax.jit(mapped)(tree)


@pytest.mark.parametrize("layout", ["leaf", "flat"])
@pytest.mark.parametrize("bucket_bytes", [1, 40, 2**20])
def test_buckets_average_exactly_like_single_leaves(mesh, bucket_bytes, layout):
    tree = whole_numbers(mesh.size)
    got = averaged(mesh, tree, bucket_bytes=bucket_bytes, layout=layout)
    for name, want in tree.items():
        np.testing.assert_array_equal(got[name], want.mean(0).astype(want.dtype), err_msg=name)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 300))
def test_layouts_agree_to_the_bit_for_any_bucket_size(seed, bucket_bytes):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    tree = whole_numbers(4, seed)
    leaf, flat = (
        averaged(mesh, tree, bucket_bytes=bucket_bytes, layout=layout)
        for layout in ("leaf", "flat")
    )
    jax.tree.map(np.testing.assert_array_equal, leaf, flat)


def test_averaging_what_is_averaged_changes_nothing(mesh):
    """NUM-3: replica r holds r; all end with (n - 1) / 2, however often it is averaged."""

    def replica(x):
        reduce = jddp.average_gradients("data")
        x, _ = reduce.update({"g": x}, reduce.init(None))
        again, _ = reduce.update(x, optax.EmptyState())
        return x["g"], again["g"]

    rows = np.arange(mesh.size, dtype=np.float32)
    mapped = jax.shard_map(replica, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    for got in jax.jit(mapped)(rows):
        np.testing.assert_array_equal(got, [(mesh.size - 1) / 2])


def test_auto_is_flat_on_gpus_and_leaf_elsewhere():
    assert [resolve_layout("auto", lambda p=p: p) for p in ("gpu", "cpu")] == ["flat", "leaf"]
    with pytest.raises(ConfigError, match="'round'"):
        resolve_layout("round", lambda: "cpu")


def test_a_combine_threshold_of_the_user_stands(monkeypatch):
    name = "xla_gpu_all_reduce_combine_threshold_bytes"
    assert compiler_options("flat", "gpu", bucket_mb=25) == {name: 0}
    assert compiler_options("leaf", "gpu", bucket_mb=2) == {name: 2 * 2**20}
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=7")
    assert compiler_options("flat", "gpu", bucket_mb=25) == {}
    assert compiler_options("leaf", "cpu", bucket_mb=25) == {}


def test_a_plan_fits_a_terminal_of_80_columns():
    tree = {"a_rather_long_name_of_a_layer" * 3: {"kernel": shape(10), "bias": shape(10)}}
    text = str(plan_buckets(tree, bucket_bytes=40))
    assert max(map(len, text.splitlines())) <= 80
    assert plan_buckets(tree, bucket_bytes=40)._repr_html_().startswith("<table>")
