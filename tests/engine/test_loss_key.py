"""A key for the loss: another in every step, replica and micro-batch, the same when repeated."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sweeps import swept
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.modules.base import stream

REPLICAS = 4
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


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
