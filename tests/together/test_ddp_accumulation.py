"""PyTorch DDP's cases of gradient accumulation (ACC): k parts, one reduction."""

import jax
import jax.numpy as jnp
import judge
import numpy as np
import optax
import pytest
from flax import linen as nn
from judge import REPLICAS, WIDTH, Net, beside_one_device, in_both_places, make_rows, start, wrapped
from oracle import on_one_device
from states import assert_same, copied
from tiny import ConvNet, Of, loss_fn, make_batch

import jddp

# All rows, all but the last, and those of one micro-batch of one replica.
MASKS = [np.ones(32, bool), np.arange(32) < 27, np.arange(32) // 2 == 9]


def test_k_micro_batches_equal_one_device_on_the_joined_batch():
    """ACC-1: entries count alike, however they are spread over replicas and micro-batches."""
    batches = [{**make_rows(32, seed=i), "mask": mask} for i, mask in enumerate(MASKS)]
    beside_one_device(Net(), batches=batches, accumulate_steps=4)


@in_both_places
def test_what_travels_depends_neither_on_k_nor_on_the_rows(place):
    """ACC-1: not its number, not its bytes; and nothing travels inside of the loop over parts."""

    def collectives(num_parts, rows_of_a_part):
        ddp = wrapped(Net(), accumulate_steps=num_parts, **place)
        found = judge.sent(ddp, make_rows(REPLICAS * num_parts * rows_of_a_part))
        return sorted((x.op, x.dtypes, x.bytes, x.is_in_loop, x.num_runs) for x in found)

    want = collectives(1, 2)
    assert all(op == "all-reduce" and num_runs == 1 for op, *_, num_runs in want)
    assert sum(x[2] for x in want) == 4 * (WIDTH * WIDTH + WIDTH + WIDTH + 1) + 8
    assert collectives(2, 2) == collectives(8, 5) == want


@in_both_places
def test_memory_does_not_grow_with_k(place):
    """As many rows in each part. The batch is an argument, and not counted.

    What each part may add is its key, and the sum and the count of its losses: sixteen bytes.
    """

    wide = Of(lambda m, x: nn.Dense(1)(nn.tanh(nn.Dense(64)(nn.tanh(nn.Dense(64)(x)))))[:, 0])

    def temporaries(num_parts):
        ddp = wrapped(wide, mesh=2, accumulate_steps=num_parts, **place)
        compiled = ddp.lower(make_rows(2 * 32 * num_parts)).compile()
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


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(WIDTH)(x))
        return nn.Dense(1)(nn.tanh(x))[:, 0]


def parts_in_order(model, optimizer, num_parts):
    """One device takes the parts one after the other; plain Flax and optax.

    Part i is the i-th of each replica's parts. Statistics move from part to part; gradients of
    the sums of losses add up.
    """

    def total(params, stats, part):
        given = {"params": params, "batch_stats": stats}
        y, written = model.apply(given, part["x"], mutable=["batch_stats"])
        return (part["mask"] * (y - part["y"]) ** 2).sum(), written["batch_stats"]

    @jax.jit
    def step(params, stats, opt_state, batch):
        rows = jax.tree.map(lambda x: x.reshape(REPLICAS, num_parts, -1, *x.shape[1:]), batch)
        grads, loss = jax.tree.map(jnp.zeros_like, params), 0.0
        for i in range(num_parts):
            part = jax.tree.map(lambda x, i=i: x[:, i].reshape(-1, *x.shape[3:]), rows)
            (more, stats), g = jax.value_and_grad(total, has_aux=True)(params, stats, part)
            grads, loss = jax.tree.map(jnp.add, grads, g), loss + more
        count = batch["mask"].sum()
        grads = jax.tree.map(lambda g: g / count, grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats, opt_state, loss / count

    return step


def test_with_batch_norm_k_micro_batches_equal_one_device_that_takes_them_in_order():
    batches = [{**make_rows(32, seed=i), "mask": np.float32(MASKS[i])} for i in range(2)]
    optimizer = optax.sgd(0.1, momentum=0.9)
    step = parts_in_order(Normed(), optimizer, 4)
    for place in judge.PLACES.values():
        ddp = wrapped(Normed(), optimizer=optimizer, accumulate_steps=4, **place)
        state = start(ddp, batches[0])
        one = on_one_device((state.params, state.model_state["batch_stats"], state.opt_state))
        for batch in batches:
            state, metrics = ddp.step(state, batch)
            *one, loss = step(*one, batch)
            got = state.params, state.model_state["batch_stats"], state.opt_state
            # Variances of float32 sums in another order, and gradients through them.
            for a, b in zip(judge.host(got), one, strict=True):
                judge.assert_close(a, b, rtol=1e-5)
            np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)


@in_both_places
def test_a_hook_sees_each_bucket_once_however_many_micro_batches_there_are(place):
    """ACC-2: and what it multiplies by two and divides by two is what it was."""
    calls = []

    def reduce(bucket, comm_state, axis):
        calls.append(bucket.index)
        doubled = jax.tree.map(lambda x: 2 * x, bucket)
        return jax.tree.map(lambda x: x / 2, jax.lax.pmean(doubled, axis)), comm_state

    hook = jddp.CommHook(lambda plan: (), reduce)
    ddp = wrapped(Net(), comm_hook=hook, accumulate_steps=4, **place)
    plain = wrapped(Net(), accumulate_steps=4, **place)
    state, other = start(ddp, make_rows()), start(plain, make_rows())
    assert_same(ddp.step(state, make_rows())[0].params, plain.step(other, make_rows())[0].params)
    assert calls == list(range(len(ddp.plan)))


def by_share(model, batch):
    """The first row of each share and part chooses for all of its rows."""
    x = batch["x"]
    if model.is_initializing():
        return model(x)
    branches = (lambda model, x: model.a(x)), (lambda model, x: model.b(x))
    return (nn.cond(x[0, 0] > 0, *branches, model, x) - 1) ** 2


def test_replicas_may_use_other_layers_in_each_micro_batch():
    """ACC-4: four replicas, four parts, each with a choice of its own; one row in each."""

    def by_row(model, batch):
        x = batch["x"]
        return (jnp.where(x[:, 0] > 0, model.a(x), model.b(x)) - 1) ** 2

    ddp, _ = beside_one_device(judge.Either(), by_share, alone=by_row, accumulate_steps=4)
    assert ddp.plan.unused == ()


def test_evaluation_in_between_leaves_no_trace():
    """ACC-1, ACC-5: what is run without gradients is added to nothing."""
    options = {"accumulate_steps": 2, "donate": False, "overlap": True}
    ddp = jddp.DataParallel(ConvNet(), optax.adam(0.1), loss_fn, **options)
    state = ddp.init(0, make_batch(32))
    want, _ = ddp.step(state, make_batch(32))
    kept = copied(state)
    ddp.evaluate(state, [make_batch(32, seed=1), make_batch(5)])
    assert_same(state, kept)
    assert_same(ddp.step(state, make_batch(32))[0], want)


@pytest.mark.parametrize("overlap", [False, True])
def test_two_micro_batches_draw_random_numbers_of_their_own(overlap):
    def drop(m, x, train):
        kept = nn.Dropout(0.5, deterministic=not train)(x)
        return m.param("weight", nn.initializers.ones, ()) * kept

    def loss(model, batch, train):
        kept = model(batch["x"], train=train).mean(-1)
        return kept, {"square": kept**2}

    options = {"mesh": 1, "accumulate_steps": 2, "overlap": overlap}
    ddp = jddp.DataParallel(Of(drop), optax.sgd(0.1), loss, **options)
    batch = {"x": np.ones((2, 101), np.float32)}  # odd: two draws hardly keep alike many
    _, metrics = ddp.step(ddp.init(0, batch), batch)
    assert metrics["square"] > metrics["loss"] ** 2 + 1e-6
