"""Losses: their values by hand, how they call a model, and what they refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jddp
from jddp.ground.errors import ConfigError
from jddp.modules.base import call_model
from jddp.zoo.losses import LOSSES, cross_entropy, mean_squared_error, next_token

LOGITS = jnp.array([[2.0, 0.0, -1.0], [0.0, 0.0, 0.0], [1.0, 3.0, 2.0]])
LABELS = jnp.array([0, 2, 0])


def log_softmax(logits):
    logits = np.asarray(logits)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def identity(x):
    return x


class Table(nn.Module):
    """Logits that depend on the last token alone: the rows of a table."""

    rows: np.ndarray

    @nn.compact
    def __call__(self, tokens):
        return self.param("rows", lambda key: jnp.asarray(self.rows))[tokens]


def test_cross_entropy_is_per_example_smoothed_in_training_and_of_both_labels_of_a_mixed_image():
    batch = {"image": LOGITS, "label": LABELS}
    losses, metrics = cross_entropy(identity, batch, True)
    np.testing.assert_allclose(losses, -log_softmax(LOGITS)[[0, 1, 2], LABELS], rtol=1e-6)
    assert metrics["accuracy"].tolist() == [True, False, False]
    smooth, _ = cross_entropy(identity, batch, True, label_smoothing=0.3)
    targets = 0.7 * np.eye(3)[LABELS] + 0.1
    np.testing.assert_allclose(smooth, -(targets * log_softmax(LOGITS)).sum(-1), rtol=1e-6)
    judged, _ = cross_entropy(identity, batch, False, label_smoothing=0.3)
    np.testing.assert_array_equal(judged, cross_entropy(identity, batch, False)[0])
    others, share = jnp.array([-1, 0, 0]), jnp.array([1.0, 0.75, 0.25])  # One is not mixed.
    batch = {"image": LOGITS, "label": LABELS, "other_label": others, "share": share}
    losses, _ = cross_entropy(identity, batch, True)
    one, other = (-log_softmax(LOGITS)[[0, 1, 2], labels] for labels in (LABELS, others))
    np.testing.assert_allclose(losses, share * one + (1 - share) * other, rtol=1e-6)


@pytest.mark.parametrize("kwargs", [{}, {"label_smoothing": 0.1}, {"class_weights": [1.0, 2, 3]}])
def test_the_loss_of_a_label_that_is_no_class_is_nan_unless_it_is_masked_out(kwargs):
    batch = {"x": LOGITS[:, :3], "label": jnp.array([-1, 3, 0])}

    def loss_fn(model, batch, train):
        return cross_entropy(model, batch, train, **kwargs)

    losses, _ = loss_fn(identity, batch, True)
    found = losses.total if kwargs.get("class_weights") else losses
    assert np.isnan(found).tolist() == [True, True, False]

    ddp = jddp.DataParallel(nn.Dense(3), optax.sgd(1.0), loss_fn, mesh=1)
    state = ddp.init(seed=0, batch=batch)
    one = {name: x[2:] for name, x in batch.items()}
    batch["mask"] = jnp.array([0.0, 0.0, 1.0])
    assert ddp.evaluate(state, [batch])["loss"] == pytest.approx(ddp.evaluate(state, [one])["loss"])
    state, metrics = ddp.step(state, batch)
    assert np.isfinite(metrics["loss"])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state.params)))


def test_a_model_that_names_a_mask_is_told_which_rows_count():
    batch = {"image": LOGITS, "label": LABELS, "mask": jnp.array([1.0, 0.0, 1.0])}
    losses, _ = cross_entropy(lambda x, mask=None: x * mask[:, None], batch, True)
    assert losses[1] == pytest.approx(np.log(3))
    unmasked = {"image": LOGITS, "label": LABELS}
    got, want = (cross_entropy(identity, each, True)[0] for each in (batch, unmasked))
    np.testing.assert_array_equal(got, want)


def test_next_token_is_the_cross_entropy_of_optax_without_a_scatter():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
    tokens = jnp.array([[0, 2, 1, 4], [1, 0, 0, 3]])

    def losses(logits):
        return next_token(lambda _: logits, {"tokens": tokens}, True)[0]

    def of_optax(logits):
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])

    np.testing.assert_allclose(losses(logits), of_optax(logits), rtol=1e-6)
    got, want = (jax.grad(lambda x, f=f: f(x).sum())(logits) for f in (losses, of_optax))
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert "scatter" not in str(jax.make_jaxpr(jax.grad(lambda x: losses(x).sum()))(logits))
    unknown = next_token(lambda _: logits, {"tokens": tokens.at[0, 1].set(5)}, True)[0]
    assert jnp.isnan(unknown).tolist() == [[True, False, False], [False] * 3]


def test_perplexity_and_bits_per_byte_are_those_of_the_sum_of_all_losses():
    """The mean of the perplexities of two batches would be another number."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(5, 5)).astype(np.float32) * 2
    tokens = rng.integers(5, size=(9, 8)).astype(np.int32)
    mask = (rng.random((9, 7)) < 0.7).astype(np.float32)
    loss = functools.partial(next_token, bytes_per_token=3.5)
    ddp = jddp.DataParallel(Table(table), optax.sgd(0.1), loss, mesh=2)
    rows = {"tokens": tokens, "mask": mask}
    state = ddp.init(0, {name: x[:2] for name, x in rows.items()})
    found = ddp.evaluate(
        state, [{n: x[i] for n, x in rows.items()} for i in np.split(range(9), [4])]
    )
    nats = -np.take_along_axis(log_softmax(table)[tokens[:, :-1]], tokens[:, 1:, None], -1)[..., 0]
    assert found["loss"] == pytest.approx(nats[mask > 0].astype(np.float64).mean(), rel=1e-6)
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]), rel=1e-12)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / np.log(2) / 3.5, rel=1e-12)
    _, metrics = ddp.step(state, {name: x[:2] for name, x in rows.items()})
    assert metrics.keys() == {"loss", "accuracy", "count"}


def test_a_perplexity_too_large_for_a_number_is_infinite():
    losses = next_token(lambda tokens: LOGITS[tokens], {"tokens": jnp.array([[0, 1]])}, False)[1]
    assert losses["perplexity"].compute(np.float64(1e6), 10) == np.inf


def test_mean_squared_error_averages_over_outputs_and_not_over_examples():
    batch = {"x": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "y": jnp.array([[1.0, 0.0], [0.0, 0.0]])}
    assert mean_squared_error(identity, batch, True).tolist() == [2.0, 12.5]


@pytest.mark.parametrize("word", ["train", "training", "is_training", "deterministic", "other"])
@pytest.mark.parametrize("train", [False, True])
def test_a_model_is_told_its_mode_in_its_own_word(word, train):
    scope = {}
    exec(f"def call(self, x, {word}=None): return {word}", scope)
    want = {"deterministic": not train, "other": None}.get(word, train)
    linen = type("Linen", (nn.Module,), {"__call__": scope["call"]})()
    module = type("NNX", (nnx.Module,), {"__call__": scope["call"]})()
    assert call_model(linen.bind({}), jnp.zeros(1), train) is want
    assert call_model(module, jnp.zeros(1), train) is want
    set_to_eval = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))  # whose mode stays
    set_to_eval.eval()
    np.testing.assert_array_equal(call_model(set_to_eval, jnp.ones(8), True), np.ones(8))


def test_batches_that_do_not_fit_are_refused_while_tracing():
    assert list(LOSSES) == sorted(LOSSES)
    for loss, batch, message in (
        ("cross_entropy", {"tokens": LABELS}, "'image' is missing"),
        ("next_token", {"image": LOGITS}, "'tokens' is missing"),
        ("cross_entropy", {"image": LOGITS[None], "label": LABELS}, "cross_entropy: the model"),
        ("mean_squared_error", {"x": LOGITS, "y": LABELS}, "mean_squared_error: the model"),
    ):
        with pytest.raises(ConfigError, match=message):
            jax.eval_shape(lambda loss=loss, batch=batch: LOSSES[loss](identity, batch, True))
    with pytest.raises(ConfigError, match="bytes_per_token"):
        next_token(lambda x: LOGITS[x], {"tokens": LABELS[None]}, False, bytes_per_token=0.0)
