"""PyTorch DDP's cases of equality (NUM), buckets (BKT) and accumulation (ACC): see README.md."""

import functools

import jax
import jax.numpy as jnp
import judge
import numpy as np
import optax
import pytest
from flax import linen as nn
from judge import Net, beside_one_device, in_both_places, joined, make_rows, sent, start, wrapped
from states import assert_same
from test_transforms import by_rows, by_shares
from tiny import Of

import jddp


@in_both_places
@pytest.mark.parametrize("rows, size", [(2, 2**15), (512, 2**10)])
def test_a_half_precision_gradient_is_finite_where_its_mean_is(place, rows, size):
    """NUM-4: float16 ends at 65504, and neither replicas nor rows may be added up beyond it."""
    batch = {"x": np.full(rows, size, np.float16)}
    options = {"mesh": 2, "optimizer": optax.sgd(1.0), **place}
    half = Of(lambda m, x: m.param("w", nn.initializers.zeros, (), jnp.float16) * x)
    ddp = wrapped(half, lambda m, b: m(b["x"]), **options)
    state, metrics = ddp.step(ddp.init(0, batch), batch)
    assert float(state.params["w"]) == -size
    assert float(metrics["loss"]) == 0


def layers(used, m, x):
    """Two layers, of which the first ones are used."""
    for i in range(2):
        y = nn.Dense(judge.WIDTH, use_bias=False, name=f"layer_{i}")(x)
        x = nn.tanh(y) if i < used else x
    return x.sum(-1)


def test_a_bucket_of_unused_parameters_is_not_sent():
    """BKT-8: one all-reduce where there were two; parameters as on one device."""
    small = 2  # the loss and its count
    for used, want in ((1, [small, 16]), (2, [small, 16, 16])):
        small_buckets = {"reduction": jddp.Reduction(bucket_mb=64 / 2**20)}
        model = Of(functools.partial(layers, used))
        ddp = wrapped(model, **joined(judge.PLACES["flat-ready"], small_buckets))
        assert sorted(x.num_elements for x in sent(ddp)) == want
    beside_one_device(Of(functools.partial(layers, 1)), places=["flat-ready"])


@in_both_places
def test_what_travels_depends_neither_on_k_nor_on_the_rows(place):
    """ACC-1: not its number, not its bytes; and nothing travels inside of the loop over parts."""

    def collectives(num_parts, rows_of_a_part):
        ddp = wrapped(Net(), accumulate_steps=num_parts, **place)
        found = judge.sent(ddp, make_rows(judge.REPLICAS * num_parts * rows_of_a_part))
        return sorted((x.op, x.dtypes, x.bytes, x.is_in_loop, x.num_runs) for x in found)

    want = collectives(1, 2)
    assert all(op == "all-reduce" and num_runs == 1 for op, *_, num_runs in want)
    assert (
        sum(x[2] for x in want)
        == 4 * (judge.WIDTH * judge.WIDTH + judge.WIDTH + judge.WIDTH + 1) + 8
    )
    assert collectives(2, 2) == collectives(8, 5) == want


@in_both_places
def test_memory_does_not_grow_with_k(place):
    """As many rows in each part. The batch is an argument, and not counted.

    What each part may add is its key, and the sum and the count of its losses: sixteen bytes.
    """

    wide = Of(lambda m, x: nn.Dense(1)(nn.tanh(nn.Dense(64)(nn.tanh(nn.Dense(64)(x)))))[:, 0])

    def temporaries(num_parts):
        ddp = wrapped(wide, mesh=2, accumulate_steps=num_parts, **place)
        compiled = ddp.steps.lower(make_rows(2 * 32 * num_parts)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(12) <= temporaries(3) + 9 * 16


@in_both_places
def test_half_precision_gradients_are_summed_in_float32(place):
    """256 and 1 and 1: bfloat16 knows nothing between 256 and 258."""
    half = Of(lambda m, x: m.param("w", nn.initializers.zeros, (), jnp.bfloat16) * x)
    batch = {"x": np.repeat(np.array([[256, 1, 1]], np.float32), 4, 0).ravel()}
    options = {"accumulate_steps": 3, "optimizer": optax.sgd(1.0), **place}
    ddp = wrapped(half, lambda m, b: m(b["x"].astype(jnp.bfloat16)), **options)
    state, _ = ddp.step(ddp.init(0, batch), batch)
    assert state.params["w"].dtype == jnp.bfloat16
    assert float(state.params["w"]) == -258 / 3


@in_both_places
def test_a_hook_sees_each_bucket_once_however_many_micro_batches_there_are(place):
    """ACC-2: and what it multiplies by two and divides by two is what it was."""
    calls = []

    def reduce(bucket, comm_state, axis):
        calls.append(bucket.index)
        doubled = jax.tree.map(lambda x: 2 * x, bucket)
        return jax.tree.map(lambda x: x / 2, jax.lax.pmean(doubled, axis)), comm_state

    hooks = (None, jddp.CommHook(lambda plan: (), reduce))
    plain, ddp = (
        wrapped(Net(), accumulate_steps=4, **joined(place, reduction=jddp.Reduction(hook=x)))
        for x in hooks
    )
    got, want = (x.step(start(x, make_rows()), make_rows())[0].params for x in (ddp, plain))
    assert_same(got, want)
    assert calls == list(range(len(ddp.plan)))


def test_replicas_may_use_other_layers_in_each_micro_batch():
    """ACC-4: four replicas, four parts, each with a choice of its own; one row in each."""
    ddp, _ = beside_one_device(judge.Either(), by_shares, alone=by_rows, accumulate_steps=4)
    assert ddp.plan.unused == ()


@pytest.mark.parametrize("overlap", [False, True])
def test_two_micro_batches_draw_random_numbers_of_their_own(overlap):
    def drop(m, x, train):
        kept = nn.Dropout(0.5, deterministic=not train)(x)
        return m.param("weight", nn.initializers.ones, ()) * kept

    def loss(model, batch, train):
        kept = model(batch["x"], train=train).mean(-1)
        return kept, {"square": kept**2}

    options = {"mesh": 1, "accumulate_steps": 2, "reduction": jddp.Reduction(overlap=overlap)}
    ddp = jddp.DataParallel(Of(drop), optax.sgd(0.1), loss, **options)
    # An odd number: two draws hardly keep alike many. Rows without elements are cut as others are.
    batch = {"x": np.ones((2, 101), np.float32), "none": np.zeros((2, 0), np.float32)}
    _, metrics = ddp.step(ddp.init(0, batch), batch)
    assert metrics["square"] > metrics["loss"] ** 2 + 1e-6
