"""A key for the loss: another in every step, replica and micro-batch, the same when repeated."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sweeps import swept
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.modules.base import stream

REPLICAS = 4
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Dropping(nnx.Module):
    """A model that takes the streams of its random numbers as an argument, as Flax's MNIST does."""

    def __init__(self, rngs):
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x, rngs):
        return self.last(self.dropout(nnx.relu(self.first(x)), rngs=rngs))


def of_streams(model, batch, key):
    return cross_entropy(model(batch["x"], nnx.Rngs(key)), batch["y"])


def of_one_seed(model, batch):
    return cross_entropy(model(batch["x"], nnx.Rngs(0)), batch["y"])


def keyed(model, batch, train, key):
    """The losses, and a number of the key."""
    losses, _ = loss_fn(model, batch, train)
    return losses, {"drawn": jax.random.uniform(key)}


def drawn(state, step, replica, micro_batch=None):
    """The number that a replica draws, by the documented rule."""
    key = state.key
    for number in (step, replica) if micro_batch is None else (step, replica, micro_batch):
        key = jax.random.fold_in(key, number)
    return float(jax.random.uniform(stream(key, "loss")))


OPTIONS = {
    "plain": {},
    "micro-batches": {"accumulate_steps": 2},
    "overlap": {"accumulate_steps": 2, "reduction": jddp.Reduction(overlap=True)},
    "logical replicas": {"mesh": 2, "strategy": jddp.LogicalReplicas(REPLICAS)},
    "local steps": {"strategy": jddp.LocalSteps(2)},
}


@pytest.mark.parametrize("options", swept(OPTIONS, every=3))
def test_the_key_of_a_loss_is_folded_per_step_replica_and_micro_batch(options):
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), keyed, **{"mesh": REPLICAS, **options})
    state = first = ddp.init(0, make_batch())
    first = jax.tree.map(jnp.copy, first)
    parts = range(2) if "accumulate_steps" in options else [None]
    for step in range(2):
        state, metrics = ddp.step(state, make_batch())
        want = [drawn(first, step, r, part) for r in range(REPLICAS) for part in parts]
        assert len(set(want)) == len(want)
        np.testing.assert_allclose(metrics["drawn"], np.mean(want), rtol=1e-6)


def test_each_evaluation_draws_the_same_numbers_and_each_of_its_batches_others():
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), keyed, mesh=REPLICAS)
    state = ddp.init(0, make_batch())
    batches = [make_batch(), make_batch()]
    before = ddp.evaluate(state, batches)["drawn"]
    state, _ = ddp.step(state, make_batch())
    assert ddp.evaluate(state, batches)["drawn"] == before
    assert ddp.evaluate(state, batches[:1])["drawn"] != before
    want = [drawn(state, number, r) for number in range(2) for r in range(REPLICAS)]
    np.testing.assert_allclose(before, np.mean(want), rtol=1e-6)

    def noise(model, batch, key):
        return jax.random.normal(key, batch["y"].shape)

    assert len(np.unique(ddp.predict(state, batches, noise))) == 2 * len(make_batch()["y"])


def test_an_argument_key_with_a_value_stays_the_losses_own():
    def loss(model, batch, train, key="y"):
        return cross_entropy(model(batch["x"], train), batch[key])

    def optional(model, batch, train, key=None):
        assert key is not None
        return loss(model, batch, train)

    for given in (loss, optional):
        ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), given, mesh=2)
        ddp.step(ddp.init(0, make_batch()), make_batch())


KEY = jax.random.key(3)


def of_a_closure(model, batch, train):
    losses, _ = loss_fn(model, batch, train)
    return losses * jax.random.uniform(jax.random.fold_in(KEY, 1), losses.shape)


def in_a_loop(model, batch, train):
    def body(total, i):
        key = jax.random.fold_in(jax.random.PRNGKey(0), i)
        return total + jax.random.uniform(key), None

    return loss_fn(model, batch, train)[0] * jax.lax.scan(body, 0.0, jnp.arange(3))[0]


def of_its_rows(model, batch, train):
    key = jax.random.fold_in(jax.random.key(0), batch["y"][0])
    return loss_fn(model, batch, train)[0] * jax.random.uniform(key)


def carried(model, batch, train, key):
    def body(key, _):
        key, own = jax.random.split(key)
        return key, jax.random.uniform(own)

    return loss_fn(model, batch, train)[0] * jax.lax.scan(body, key, None, 3)[1].sum()


WARNED = {
    "rngs": (of_one_seed, Dropping(nnx.Rngs(0)), True),
    "closure": (of_a_closure, MLP(), True),
    "loop": (in_a_loop, MLP(), True),
    "rows": (of_its_rows, MLP(), False),
    "carried": (carried, MLP(), False),
    "streams": (of_streams, Dropping(nnx.Rngs(0)), False),
    "dropout": (loss_fn, MLP(dropout_rate=0.5), False),
}


@pytest.mark.parametrize("loss, model, warned", WARNED.values(), ids=WARNED)
def test_fit_warns_of_keys_made_from_constants(loss, model, warned, caplog):
    with caplog.at_level(logging.WARNING, "jddp"):
        jddp.fit(
            jddp.DataParallel(model, optax.sgd(0.1), loss, mesh=2), [make_batch()], num_steps=1
        )
    said = [x.getMessage() for x in caplog.records if "made from constants" in x.getMessage()]
    assert len(said) == warned
    assert all("argument `key`" in x and "\n" not in x for x in said)
