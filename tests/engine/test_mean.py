"""`jddp.Mean`: a loss that divides by its own count is one device's, however counts are spread."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import linen as nn
from states import close
from sweeps import swept
from tiny import Of

import jddp
from jddp.data import ArrayExamples, TrainBatches
from jddp.ground.errors import UsageError

VOCAB, LENGTH = 11, 6
TAGGER = Of(lambda m, tokens: nn.Dense(VOCAB)(nn.tanh(nn.Embed(VOCAB, 8)(tokens))))


def token_losses(model, batch):
    logits = model(batch["inputs"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])


def weights_of(batch):
    return (batch["targets"] > 0) * batch["scale"]


wrapped = functools.partial(tiny.wrapped, TAGGER, optax.sgd(0.5), mesh=None)


def weighed(function):
    """A loss that is a function of weighed losses and of their weights."""

    def loss(model, batch, train):
        weights = weights_of(batch)
        return function(token_losses(model, batch) * weights, weights)

    return loss


# As Flax's lm1b and wmt compute it: one total and one count; without a `Mean` each replica's own.
as_scalars = weighed(lambda losses, weights: jddp.Mean(losses.sum(), weights.sum()))
local_mean = weighed(lambda losses, weights: losses.sum() / weights.sum())
as_rows = weighed(lambda losses, weights: jddp.Mean(losses.sum(1), weights.sum(1)))
as_arrays = weighed(jddp.Mean)


def make_batch(rows=32, seed=0):
    """Sentences from full to empty: the last quarter has no target at all."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, VOCAB, size=(2, rows, LENGTH), dtype=np.int32)
    lengths = np.linspace(LENGTH, -LENGTH / 3, rows).round().clip(0)
    targets = np.where(np.arange(LENGTH) < lengths[:, None], tokens[1], 0)
    scale = rng.uniform(0.5, 2, size=(rows, 1)).astype(np.float32)
    return {"inputs": tokens[0], "targets": targets, "scale": scale}


def global_mean(params, batch):
    """One device with the whole batch, in plain JAX."""
    return local_mean(lambda x: TAGGER.apply({"params": params}, x), batch, True)


ROUNDING = 1e-5  # float32 sums in another order


def test_a_metric_may_be_a_mean_of_its_own_count():
    def loss(model, batch, train):
        weights = weights_of(batch)
        hits = model(batch["inputs"]).argmax(-1) == batch["targets"]
        return token_losses(model, batch), {
            "scalars": jddp.Mean((hits * weights).sum(), weights.sum()),
            "arrays": jddp.Mean(hits * weights, weights),
            "per row": jddp.Mean(weights.sum(1), (weights > 0).sum(1)),
        }

    batch = make_batch()
    ddp = wrapped(loss)
    state = ddp.init(0, batch)
    guesses = np.asarray(TAGGER.apply(ddp.model(state), batch["inputs"]).argmax(-1))
    weights = weights_of(batch)
    want = ((guesses == batch["targets"]) * weights).sum() / weights.sum()
    want = {"scalars": want, "arrays": want, "per row": weights.sum() / (weights > 0).sum()}
    for metrics in (ddp.gradients(state, batch)[1], ddp.evaluate(state, [batch])):
        close({name: metrics[name] for name in want}, want, rtol=ROUNDING, atol=0)


LOGICAL = {"strategy": jddp.LogicalReplicas(16)}
EVALUATED = [(as_arrays, {}), (as_rows, {}), (as_arrays, LOGICAL), (as_scalars, {})]


@pytest.mark.parametrize("loss, options", swept(EVALUATED, every=2))
def test_evaluation_is_exact_over_partial_and_empty_batches(loss, options):
    """Of scalars it is exact over full batches, and refused over a partial one."""
    ddp, rows = wrapped(loss, **options), make_batch(32 if loss is as_scalars else 45)
    state = ddp.init(0, make_batch(16))
    want = global_mean(ddp.model(state)["params"], rows)
    ends = (0, 16) if loss is as_scalars else (0, 16, 32, 48)
    got = ddp.evaluate(state, [jax.tree.map(lambda x, a=a: x[a : a + 16], rows) for a in ends])
    assert got["examples"] == len(rows["inputs"])
    np.testing.assert_allclose(got["loss"], want, rtol=ROUNDING)
    if loss is as_scalars:
        with pytest.raises(UsageError, match="'loss' is a scalar.* jddp.Mean of totals and counts"):
            ddp.evaluate(state, [make_batch(13)])


def test_padded_training_batches_are_masked_for_arrays_and_refused_for_scalars():
    plan = {"seed": 0, "num_epochs": 4, "multiple_of": 8}
    batches = TrainBatches(ArrayExamples(make_batch(37)), global_batch_size=32, **plan)
    assert int(jddp.fit(wrapped(as_arrays), batches, num_steps=4).state.step) == 4
    with pytest.raises(UsageError, match="jddp.Mean of totals and counts per row"):
        jddp.fit(wrapped(as_scalars), batches, num_steps=4)


def test_a_mask_leaves_out_what_it_forbids_and_weighs_nothing_twice():
    """In a `Mean` the user has weighed the losses already; a NaN that is left out does no harm."""

    def loss(model, batch, train):
        losses = jnp.where(batch["mask"], token_losses(model, batch) * batch["w"], jnp.nan)
        return jddp.Mean(losses, batch["w"])

    weights = weights_of(make_batch()).astype(np.float32)
    batch = make_batch() | {"w": weights, "mask": weights > 0}
    ddp = wrapped(loss)
    state = ddp.init(0, batch)
    grads, metrics = ddp.gradients(state, batch)
    want = jax.value_and_grad(global_mean)(ddp.model(state)["params"], batch)
    close((metrics["loss"], grads), want, rtol=ROUNDING)


@pytest.mark.parametrize("name", swept(["mask", "weights", "loss_mask"], every=3))
def test_a_scalar_loss_beside_weights_is_warned_about_once(name, caplog):
    def scalar(model, batch, train):
        return (token_losses(model, batch) * batch[name]).sum() / batch[name].sum()

    batch = make_batch() | {name: np.ones((32, LENGTH), np.float32)}
    with caplog.at_level(logging.WARNING, logger="jddp"):
        for loss in (as_scalars, token_losses):  # They weigh rightly.
            jddp.fit(wrapped(loss), [batch], num_steps=1)
        ddp = wrapped(scalar)
        jddp.fit(ddp, [batch] * 3, num_steps=3, evaluate=[batch])
        jddp.fit(ddp, [jax.tree.map(lambda x: x[:16], batch)] * 3, num_steps=3)
    (warning,) = [x.getMessage() for x in caplog.records if "scalar" in x.getMessage()]
    assert f"the batch has {name!r}" in warning
    assert "jddp.Mean" in warning
