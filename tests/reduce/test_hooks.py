"""Wire formats and custom hooks, with PyTorch DDP's cases of communication hooks (HK)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import linen as nn
from flax import nnx
from jax import P, lax
from judge import PLACES, Net, host, in_both_places, joined, make_rows, sent, start, wrapped
from states import close, equal
from sweeps import swept
from tiny import NnxConvNet, Of, make_batch, take_steps

import jddp
from jddp.ground.errors import ConfigError

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
        leaves = [lax.pmean(x, axis) for x in bucket.leaves]
        return bucket.with_leaves(leaves), comm_state

    def gradients(hook):
        model = nn.Sequential([nn.Dense(256), nn.Dense(256), nn.Dense(4)])
        options = joined(place, reduction=jddp.Reduction(hook=hook))
        ddp = tiny.wrapped(model, loss=lambda model, batch: model(batch["x"]).sum(-1), **options)
        return ddp.gradients(ddp.init(0, make_batch()), make_batch())[0]

    close(gradients(reducing(reduce)), gradients(None), rtol=1e-6)  # sums in another order
    assert all(tuple(shapes) == planned for shapes, planned, _ in seen)
    assert max(num for *_, num in seen) == (2 if place["reduction"].layout == "leaf" else 1)


def test_a_hook_that_remembers_needs_a_batch_to_plan_by():
    reduction = jddp.Reduction(hook=counting([], []))
    ddp = tiny.wrapped(NnxConvNet(nnx.Rngs(0)), reduction=reduction)
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
    hook = stateless(reduce)
    options = joined(place, reduction=jddp.Reduction(hook=hook))
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
