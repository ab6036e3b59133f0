"""Bucket plans, and averages that do not depend on them; wire formats and hooks as of DDP."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax import P, lax
from judge import PLACES, Net, host, in_both_places, joined, make_rows, sent, start, wrapped
from states import close, equal
from sweeps import swept
from tiny import NnxConvNet, Of, make_batch, take_steps

import jddp
from jddp.ground.errors import ConfigError
from jddp.reduce.backward import Finished
from jddp.reduce.hooks import MANY, choose_packing
from jddp.reduce.plan import BucketPlan, plan_buckets
from jddp.reduce.reducer import BUCKET_MB, Reducer, bucket_sizes, choose_layout, compiler_options

MIB = 2**20
BFLOAT16 = np.dtype(jnp.bfloat16)


def device_on(platform, kind=""):
    return SimpleNamespace(platform=platform, device_kind=kind)


def reduction(
    platform="cpu", *, layout="auto", comm_hook=None, bucket_mb=BUCKET_MB, is_sharded=False
):
    """From a user's options; only these matter to a test."""
    chosen, _ = choose_layout(layout, False, lambda: device_on(platform))
    sizes = bucket_sizes(bucket_mb)
    packed = choose_packing(chosen, comm_hook, platform, is_sharded=is_sharded)
    return Reducer("data", sizes, *packed, None)


def shape(size, dtype="float32"):
    return jax.ShapeDtypeStruct((size,), np.dtype(dtype))


def planned(sizes, bucket_bytes, **options):
    """The leaves of each bucket, if they are finished in their order."""
    tree = [shape(*size) if isinstance(size, tuple) else shape(size) for size in sizes]
    plan = plan_buckets(tree, bucket_bytes=bucket_bytes, ready=range(len(sizes)), **options)
    return [list(bucket.leaves) for bucket in plan.buckets]


F32_F64 = [(50, "float32"), (25, "float64")] * 3
THREE = {name: shape(10) for name in "abc"}
BUCKETS = {
    "BKT-1": ([100, 200, 100, 50], 400, [[0], [1], [2], [3]]),
    "BKT-2": (F32_F64, 400, [[0, 2], [1, 3], [4], [5]]),
    "BKT-3": ([10] * 4, (40, 80), [[0], [1, 2], [3]]),
    "BKT-4": (F32_F64, (200, 400), [[0], [1], [2, 4], [3, 5]]),
    "three limits": ([10] * 6, (40, 80, 120), [[0], [1, 2], [3, 4, 5]]),
    "one byte": ([3, 2, 1], 1, [[0], [1], [2]]),
    "a leaf larger than a bucket": ([10, 1000, 10], 80, [[0], [1], [2]]),
    "a leaf without elements": ([10, 0, 10], 80, [[0, 2]]),
    "no elements at all": ([0], 80, []),
}


@pytest.mark.parametrize("sizes, limits, buckets", BUCKETS.values(), ids=BUCKETS)
def test_leaves_share_buckets_as_those_of_ddp_do(sizes, limits, buckets):
    assert planned(sizes, limits) == buckets


def test_leaves_are_taken_in_the_order_in_which_they_are_finished():
    def buckets(ready):
        plan = plan_buckets(THREE, bucket_bytes=80, ready=ready)
        return [bucket.paths for bucket in plan.buckets]

    assert buckets([5, 9, 2]) == [("c", "a"), ("b",)]  # as they are finished
    assert buckets(None) == [("c", "b"), ("a",)]  # last to first where nothing is known
    assert buckets([3, 3, 9]) == [("b", "a"), ("c",)]  # the last of those finished at once
    # The float64 bucket is opened first and complete last, and so sent last.
    leaves = [(10, "float64"), (10, "float32"), (10, "float32"), (10, "float64")]
    assert planned(leaves, 400) == [[1, 2], [0, 3]]


def test_what_no_gradient_reaches_is_named_and_not_sent_and_an_empty_tree_needs_no_bucket():
    plan = plan_buckets(THREE, bucket_bytes=80, ready=[None, 1, None])
    assert [bucket.paths for bucket in plan.buckets] == [("b",)]
    assert plan.unused == ("a", "c")
    assert plan.wire_bytes == 40
    assert "2 unused, not sent: a, c" in str(plan)
    plan = plan_buckets({name: shape(1) for name in "abcd"}, bucket_bytes=80, ready=[None] * 4)
    assert str(plan).endswith("4 unused, not sent: a, b, c, ...")
    plan = plan_buckets({}, bucket_bytes=100)
    assert (len(plan), plan.wire_bytes) == (0, 0)
    assert "0 buckets" in str(plan)


def test_a_narrow_wire_counts_its_own_bytes():
    tree = {"a": shape(10), "h": shape(10, jnp.bfloat16), "i": shape(5, "float16")}
    tree["z"] = shape(10, "complex64")
    plan = plan_buckets(tree, bucket_bytes=1000, wire_dtype=BFLOAT16)
    wire = {b.dtype.name: (b.wire_dtype.name, b.bytes) for b in plan.buckets}
    assert wire["float32"] == wire["bfloat16"] == ("bfloat16", 20)
    assert (wire["float16"], wire["complex64"]) == (("float16", 10), ("complex64", 80))


def test_what_cannot_be_averaged_is_refused_by_its_path():
    ints, bools = (np.arange(3), "an array of int64;"), (np.array([True]), "an array of bool;")
    for leaf, what in ((3.0, "float;"), ints, bools):
        with pytest.raises(ConfigError, match=f"'layer/w' is {what}"):
            plan_buckets({"layer": {"w": leaf}}, bucket_bytes=100)


dtypes = st.sampled_from(["float32", "bfloat16", "float16", "complex64"])
shapes = st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), dtypes), max_size=12)


@given(shapes, st.integers(1, 400), st.integers(1, 400), st.randoms(use_true_random=False))
def test_every_leaf_stands_once_in_a_bucket_of_its_dtype_within_the_limit(leaves, cap, first, rng):
    tree = [jax.ShapeDtypeStruct(tuple(dims), jnp.dtype(dtype)) for dims, dtype in leaves]
    ready = [rng.choice([None, *range(20)]) for _ in tree]
    plan = plan_buckets(tree, bucket_bytes=(first, cap), ready=ready)
    sent = [i for i, x in enumerate(tree) if x.size and ready[i] is not None]
    assert sorted(i for bucket in plan.buckets for i in bucket.leaves) == sent
    assert plan.wire_bytes == sum(tree[i].size * tree[i].dtype.itemsize for i in sent)
    seen = set()
    for bucket in plan.buckets:
        assert {tree[i].dtype for i in bucket.leaves} == {bucket.dtype}
        assert list(bucket.leaves) == sorted(bucket.leaves, key=lambda i: (ready[i], -i))
        limit = cap if bucket.dtype in seen else first
        assert bucket.bytes <= limit or len(bucket.leaves) == 1
        seen.add(bucket.dtype)
    ends = [ready[bucket.leaves[-1]] for bucket in plan.buckets]
    assert ends == sorted(ends)


def whole_numbers(num_replicas, seed=0):
    """Gradients whose sums over replicas are exact in any order, one row for each replica."""
    rng = np.random.default_rng(seed)
    sizes = {"w": (3, 4), "b": (4,), "scalar": (), "empty": (0, 2), "big": (130, 130)}
    tree = {k: rng.integers(-8, 8, (num_replicas, *s)).astype(np.float32) for k, s in sizes.items()}
    return {**tree, "half": tree["b"].astype(jnp.bfloat16)}


def averaged(mesh, tree, *, bucket_bytes, **options):
    reduce = reduction(bucket_mb=[bucket_bytes / MIB], **options)

    def replica(local):
        local = jax.tree.map(lambda x: x[0], local)
        plan = reduce.plan(local)
        mean, _ = reduce(Finished(local), (), plan)
        return reduce.gather(mean, local, plan) if options.get("is_sharded") else mean

    mapped = jax.shard_map(replica, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    return jax.jit(mapped)(tree)


@pytest.mark.parametrize("layout", ["leaf", "flat"])
@pytest.mark.parametrize("bucket_bytes", [1, 40, 2**20])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_buckets_average_exactly_like_single_leaves(mesh, bucket_bytes, layout, is_sharded):
    """And so do shards of the mean that are gathered."""
    tree = whole_numbers(mesh.size)
    options = {"layout": layout, "is_sharded": is_sharded}
    got = averaged(mesh, tree, bucket_bytes=bucket_bytes, **options)
    equal(got, {name: x.mean(0).astype(x.dtype) for name, x in tree.items()})


def test_many_small_leaves_are_sent_alone_within_a_process_of_cpus():
    for num_leaves, options, num_arrays in (
        (MANY, {}, 1),
        (MANY + 1, {}, MANY + 1),  # of one shape, for which one kernel is compiled
        *(
            (MANY + 1, x, 1)
            for x in ({"on_network": True}, {"platform": "gpu"}, {"layout": "flat"})
        ),
    ):
        chosen = {"layout": "leaf", "hook": None, "platform": "cpu", "on_network": False, **options}
        packing, _, _ = choose_packing(**chosen, is_sharded=False)
        (bucket,) = plan_buckets([np.float32(0)] * num_leaves, bucket_bytes=MIB).buckets
        members = packing.members(bucket)
        assert len(members) == num_arrays
        assert sorted(i for each in members for i in each) == list(range(num_leaves))


def test_auto_is_flat_and_overlapped_on_gpus_and_leaf_and_not_elsewhere():
    for platform, layout, overlap, chosen in (
        ("cpu", "auto", "auto", ("leaf", False)),
        ("gpu", "auto", "auto", ("flat", True)),
        ("cuda", "leaf", "auto", ("leaf", False)),
        ("gpu", "auto", False, ("flat", False)),
        ("cpu", "auto", True, ("flat", True)),
        ("cpu", "flat", "auto", ("flat", False)),
    ):
        assert (
            choose_layout(layout, overlap, lambda platform=platform: device_on(platform)) == chosen
        )
    with pytest.raises(ConfigError, match="layout 'round' is unknown. Choose one of 'auto'"):
        choose_layout("round", False, lambda: device_on("cpu"))


def test_sizes_of_buckets_and_options_out_of_their_range_are_refused():
    for options, sizes in (
        ({}, (MIB, 25 * MIB)),
        ({"bucket_mb": 0.5}, (MIB // 2,)),
        ({"bucket_mb": 50}, (50 * MIB,)),
        ({"bucket_mb": [0.5, 8, 25]}, (MIB // 2, 8 * MIB, 25 * MIB)),
        ({"bucket_mb": 1e-9}, (1,)),
    ):
        assert reduction(**options).bucket_bytes == sizes
    for options, message in (
        ({"wire_dtype": "bf16"}, "wire_dtype"),
        ({"comm_hook": "mean"}, "hook"),
        *(({"bucket_mb": sizes}, "bucket_mb") for sizes in (0, [], [1, -1])),
    ):
        with pytest.raises(ConfigError, match=message):
            jddp.average_gradients(**options)


def test_only_flat_buckets_are_kept_from_being_merged_and_a_user_s_threshold_stands(monkeypatch):
    name = "xla_gpu_all_reduce_combine_threshold_bytes"
    flat, leaf = reduction(layout="flat"), reduction(layout="leaf", bucket_mb=2)
    several = reduction(layout="leaf", bucket_mb=[1, 2, 3])  # of which the last repeats
    for reduce, threshold in ((flat, 0), (leaf, 2 * MIB), (several, 3 * MIB)):
        assert compiler_options(reduce, device_on("gpu")) == {name: threshold}
    assert compiler_options(flat, device_on("tpu", "TPU v4")) == {}
    offloaded = compiler_options(flat, device_on("tpu", "TPU v6 lite"))
    assert offloaded == {"xla_tpu_enable_sparse_core_collective_offload_all_reduce": True}
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=7")
    assert compiler_options(flat, device_on("gpu")) == {}
    assert (
        compiler_options(flat, device_on("cpu")).pop("xla_disable_hlo_passes")
        == "cpu-all-reduce-combiner"
    )
    assert compiler_options(leaf, device_on("cpu")) == {
        "xla_cpu_copy_insertion_use_region_analysis": True
    }


def test_a_plan_is_a_table_of_at_most_80_columns_whose_rows_stand_for_buckets_of_one_size():
    deep = {"a_rather_long_name_of_a_layer" * 3: {"kernel": shape(10), "bias": shape(10)}}
    plan = plan_buckets(deep | {"z": shape(3, "float16")}, bucket_bytes=MIB, ready=range(3))
    rows = str(dataclasses.replace(plan, notes=("a note",))).splitlines()
    assert [row.split()[:4] for row in rows[2:4]] == [
        ["0", "7.63e-05", "2", "float32"],
        ["1", "5.72e-06", "1", "float16"],
    ]
    assert rows[4:] == ["a note"]
    two = {f"{i:03}": shape(200_000 + 50_000 * (i % 2)) for i in range(160)}
    merged = str(plan_buckets(two, bucket_bytes=MIB, ready=range(160))).splitlines()
    assert [row.split()[0] for row in merged[2:]] == ["0,2..158", "1,3..159"]
    assert max(map(len, rows + merged)) <= 80
    assert "bucket" not in BucketPlan((), group_size=8).headline


BYTES = 1 / 2**20


def average(tree, num_replicas=8, **options):
    """Averages rows of a tree, one row for each replica, by the optax transformation."""
    reduce = jddp.average_gradients("data", **options)

    def replica(rows):
        local = jax.tree.map(lambda x: x[0], rows)
        return reduce.update(local, reduce.init(local))[0]

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_replicas]), ("data",))
    mapped = jax.shard_map(replica, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    return jax.jit(mapped)(tree)


def wire_dtypes(ddp, batch):
    """Dtype and elements of each all-reduce as it was asked for: XLA:CPU widens bfloat16."""
    lowered = ddp.steps.lower(batch).as_text().split("stablehlo.all_reduce")[1:]
    shapes = [text.split("}) : (tensor<")[1].split(">")[0] for text in lowered]
    return sorted((shape.split("x")[-1], shape.split("x")[:-1]) for shape in shapes)


@pytest.mark.parametrize("wire_dtype", ["float16", jnp.bfloat16])
@in_both_places
def test_a_narrow_wire_carries_half_the_bytes(place, wire_dtype):
    options = joined(place, reduction=jddp.Reduction(wire_dtype=wire_dtype))
    wide, narrow = (tiny.wrapped(**x) for x in (place, options))
    sent, sent_wide = wire_dtypes(narrow, make_batch()), wire_dtypes(wide, make_batch())
    name = {"bfloat16": "bf16", "float16": "f16"}[jnp.dtype(wire_dtype).name]
    assert [dtype for dtype, _ in sent].count("f32") == 1  # loss and metrics
    assert {dtype for dtype, _ in sent} == {"f32", name}
    assert {dtype for dtype, _ in sent_wide} == {"f32"}
    plans = [ddp.steps.planned(make_batch()).plan for ddp in (narrow, wide)]
    assert plans[0].wire_bytes * 2 == plans[1].wire_bytes


@pytest.mark.parametrize("dtype, wire_dtype", [(np.float32, "float16"), (np.float16, None)])
def test_float16_is_divided_before_it_is_added(dtype, wire_dtype):
    """NUM-4: eight times 2**15 does not fit, on the wire or in gradients."""
    rows = np.full((8, 3), 2.0**15, dtype)
    np.testing.assert_array_equal(average({"g": rows}, wire_dtype=wire_dtype)["g"], [2.0**15] * 3)


def test_a_replica_on_its_own_sends_nothing():
    for num in (1, 2):
        step = jax.jit(lambda rows, num=num: average(rows, num_replicas=num))
        assert ("all_reduce" in step.lower({"g": jnp.ones((num, 3))}).as_text()) == (num == 2)


@pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])
def test_whole_numbers_that_fit_the_wire_stay_exact_and_what_is_complex_or_as_narrow(wire_dtype):
    rng = np.random.default_rng(0)
    whole, rows = rng.integers(-8, 8, (8, 50)).astype(np.float32), rng.normal(size=(8, 4))
    z, narrow = (rows + 1j * rows[::-1]).astype(np.complex64), rows.astype(np.float16)
    got = average({"z": z, "h": narrow, "f": whole}, wire_dtype=wire_dtype)
    dtypes = {name: x.dtype.name for name, x in got.items()}
    assert dtypes == {"z": "complex64", "h": "float16", "f": "float32"}
    np.testing.assert_array_equal(got["f"], whole.mean(0))
    np.testing.assert_allclose(got["z"], z.mean(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got["h"], rows.mean(0), atol=1e-3)


def counting(plan_seen, calls):
    """A hook that remembers how often it has run, and what it has seen while traced."""

    def init(plan):
        plan_seen.append(plan)
        return {"calls": jnp.zeros(len(plan))}

    def reduce(bucket, comm_state, axis):
        calls.append((bucket.index, bucket.is_last, bucket.planned.paths, bucket.scale))
        counted = comm_state["calls"].at[bucket.index].add(1 + lax.axis_index(axis))
        return lax.pmean(bucket, axis), {"calls": counted}

    return jddp.CommHook(init, reduce)


@in_both_places
def test_a_hook_sees_every_bucket_and_its_memory_is_each_replica_s_own(place):
    plans, calls = [], []
    options = joined(
        {"reduction": jddp.Reduction(bucket_mb=200 * BYTES, hook=counting(plans, calls))}, place
    )
    ddp = tiny.wrapped(mesh=8, accumulate_steps=4, **options)
    state, _ = take_steps(ddp, [make_batch(32)] * 3)
    num = len(ddp.plan)
    assert plans[-1] is ddp.plan
    assert [(i, is_last) for i, is_last, _, _ in calls] == [(i, i == num - 1) for i in range(num)]
    assert [paths for _, _, paths, _ in calls] == [bucket.paths for bucket in ddp.plan.buckets]
    assert {scale for *_, scale in calls} == {1 / 4}
    rows = state.comm_state.hook["calls"]
    np.testing.assert_array_equal(rows, 3 * np.outer(np.arange(1, 9), np.ones(num)))


@pytest.mark.parametrize(
    "wire_dtype, scale", [(None, 1 / 6), ("bfloat16", 1 / 6), ("float16", 8 / 6)]
)
def test_a_hook_is_given_what_travels_and_its_scale(wire_dtype, scale):
    """Gradients of sums over six rows, which a float16 wire takes an eighth of."""
    seen = set()

    def reduce(bucket, comm_state, axis):
        seen.update((x.dtype.name, bucket.scale) for x in bucket.values)
        return lax.pmean(bucket, axis), comm_state

    reduction = jddp.Reduction(wire_dtype=wire_dtype, hook=reducing(reduce))
    tiny.wrapped(mesh=8, reduction=reduction).steps.lower(make_batch(48))
    assert seen == {(wire_dtype or "float32", scale)}


@in_both_places
def test_a_hook_may_take_its_gradients_one_by_one(place):
    """In their shapes, whatever travels together; 64 KiB travel alone in the leaf layout."""
    seen = []

    def reduce(bucket, comm_state, axis):
        seen.append(([x.shape for x in bucket.leaves], bucket.planned.shapes, len(bucket.values)))
        return bucket.with_leaves([lax.pmean(x, axis) for x in bucket.leaves]), comm_state

    def gradients(hook):
        model = nn.Sequential([nn.Dense(256), nn.Dense(256), nn.Dense(4)])
        options = joined(place, reduction=jddp.Reduction(hook=hook))
        ddp = tiny.wrapped(model, loss=lambda model, batch: model(batch["x"]).sum(-1), **options)
        return ddp.gradients(ddp.init(0, make_batch()), make_batch())[0]

    close(gradients(reducing(reduce)), gradients(None), rtol=1e-6)  # sums in another order
    assert all(tuple(shapes) == planned for shapes, planned, _ in seen)
    assert max(num for *_, num in seen) == (2 if place["reduction"].layout == "leaf" else 1)


def test_a_hook_that_remembers_needs_a_batch_to_plan_by():
    ddp = tiny.wrapped(NnxConvNet(nnx.Rngs(0)), reduction=jddp.Reduction(hook=counting([], [])))
    with pytest.raises(jddp.Error, match="init needs batch="):
        ddp.init()
    batch = make_batch()
    state, _ = ddp.step(ddp.init(batch=batch), batch)
    assert state.comm_state.hook["calls"].shape == (2, len(ddp.plan))


def stateless(reduce):
    """A hook of `reduce(bucket, axis)`."""
    return reducing(lambda bucket, comm_state, axis: (reduce(bucket, axis), comm_state))


def reducing(reduce, initial=()):
    return jddp.CommHook(lambda plan: initial, reduce)


def scaled(bucket, factor):
    return jax.tree.map(lambda x: factor * x, bucket)


@in_both_places
def test_a_hook_that_does_nothing_sends_nothing(place):
    """HK-1, noop: what then travels is the loss; each replica goes its own way."""
    hook = stateless(lambda bucket, axis: bucket)
    ddp = wrapped(Net(), **joined(place, reduction=jddp.Reduction(hook=hook)))
    state, _ = ddp.step(start(ddp, make_rows()), make_rows())
    assert [x.num_elements for x in sent(ddp)] == [2]
    first, second, *_ = state.params["first"]["kernel"].addressable_shards
    assert not np.array_equal(first.data, second.data)


# Weights of gradient r on replica r, whose rows are r: the mean is (R - 1) / 2.
PLANE = Of(lambda m, x: m.param("w", nn.initializers.zeros, (2, 2)).sum() * x)
RANKS = {"rank": np.arange(4, dtype=np.float32)}
RETURNED = {
    "mean": (lax.pmean, 1.5),
    "HK-3, ten times and by two": (
        lambda b, axis: scaled(scaled(lax.pmean(b, axis), 10), 0.5),
        7.5,
    ),
    "HK-4, of its own": (lambda b, axis: jax.tree.map(lambda x: jnp.full_like(x, 2), b), 2.0),
}


@in_both_places
@pytest.mark.parametrize("reduce, gradient", RETURNED.values(), ids=RETURNED)
def test_what_a_hook_returns_is_the_gradient(reduce, gradient, place):
    options = joined(place, reduction=jddp.Reduction(hook=stateless(reduce)))
    ddp = wrapped(PLANE, lambda m, b: m(b["rank"]), optimizer=optax.sgd(1.0), **options)
    state, _ = ddp.step(ddp.init(0, RANKS), RANKS)
    np.testing.assert_array_equal(state.params["w"], np.full((2, 2), -gradient))


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("warm", swept([True, False], every=2))
@pytest.mark.parametrize("rank, place", swept([(1, "leaf-end"), (2, "flat-ready")], every=2))
def test_before_it_begins_powersgd_is_no_hook(feedback, warm, rank, place):
    """HK-2: three steps before the start, one behind it."""
    options = {"error_feedback": feedback, "warm_start": warm, "rank": rank}
    hook = jddp.powersgd(start_step=3, min_compression_rate=0.1, **options)
    reductions = (jddp.Reduction(hook=x) for x in (hook, None))
    ends = [wrapped(Net(), **joined(PLACES[place], reduction=x)) for x in reductions]
    states = [start(ddp, make_rows()) for ddp in ends]
    for i in range(4):
        states = [ddp.step(s, make_rows(seed=i))[0] for ddp, s in zip(ends, states, strict=True)]
        got, want = (host(state.params) for state in states)
        if i < 3:
            equal(got, want)
    # Biases always travel exactly; a kernel of one column is of rank 1.
    assert not np.array_equal(got["first"]["kernel"], want["first"]["kernel"])


def test_what_is_no_hook_is_refused_when_it_is_given():
    for hook in ("bfloat16", lax.pmean, (len, len), jddp.CommHook, jddp.CommHook(len, "mean")):
        with pytest.raises(ConfigError, match="hook is .* Give a jddp.CommHook"):
            wrapped(Net(), reduction=jddp.Reduction(hook=hook))


def remembering(initial, new):
    return reducing(lambda bucket, memory, axis: (lax.pmean(bucket, axis), new), initial)


def averaging(change):
    return stateless(lambda b, axis: jax.tree.map(change, lax.pmean(b, axis)))


WRONG = {
    "returns a bucket alone": reducing(lambda bucket, s, axis: lax.pmean(bucket, axis)),
    "returns nothing": reducing(lambda bucket, s, axis: None),
    "returns arrays": stateless(lambda bucket, axis: lax.pmean(bucket.values, axis)),
    "returns another shape": averaging(lambda x: x.ravel()[:-1]),
    "returns another dtype": averaging(lambda x: x.astype(jnp.bfloat16)),
    "remembers another structure": remembering((), {"calls": np.zeros(2)}),
    "remembers another shape": remembering(np.zeros(2), jnp.zeros(3)),
    "remembers another dtype": remembering(np.zeros(2), jnp.zeros(2, jnp.int32)),
}
COMES = {"returns another dtype": r".*of bfloat16\[.*that it is given: .* of float32\["}


@pytest.mark.parametrize("name", WRONG)
def test_a_hook_that_breaks_its_contract_is_refused_with_the_reason(name):
    """While the step is traced: before anything is compiled or sent."""
    with pytest.raises(ConfigError, match="hook" + COMES.get(name, "")):
        wrapped(Net(), reduction=jddp.Reduction(hook=WRONG[name])).steps.lower(make_rows())
