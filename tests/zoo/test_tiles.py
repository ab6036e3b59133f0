"""The tiled loss equals the plain one: values, gradients, steps on devices, collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from judge import STRATEGIES, host
from sweeps import swept
from tiny import take_steps, wrapped

from jddp.inspection.hlo import collectives, read_program
from jddp.zoo.losses import next_token
from jddp.zoo.models import GPT
from jddp.zoo.tiles import tiled_cross_entropy

OPTIONS = {"plain": {}, "smoothed, z": {"label_smoothing": 0.2, "z_loss": 0.02}}


def plain(hidden, table, labels, mask, label_smoothing=0.0, z_loss=0.0):
    """The loss of optax: sum over valid labels, count, and hits."""
    logits = hidden @ table.T
    targets = optax.smooth_labels(jax.nn.one_hot(labels, len(table)), label_smoothing)
    losses = optax.softmax_cross_entropy(logits, targets.astype(logits.dtype))
    losses += z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.where(mask, losses, 0).sum(), logits.argmax(-1) == labels


def drawn(dtype, vocab):
    rng = np.random.default_rng(0)
    hidden, table = rng.normal(size=(3, 7, 5)), rng.normal(size=(vocab, 5))
    mask = rng.random((3, 7)) < 0.7
    return (
        jnp.asarray(hidden, dtype),
        jnp.asarray(table, dtype),
        rng.integers(vocab, size=(3, 7)),
        mask,
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype, rtol", [("float32", 1e-6), ("float64", 1e-12)])
@pytest.mark.parametrize("vocab, tile_size", [(11, 4), (16, 21), (40, 2048)])
def test_a_tiled_loss_is_the_plain_loss_with_its_gradient(options, dtype, rtol, vocab, tile_size):
    with jax.enable_x64(dtype == "float64"):
        hidden, table, labels, mask = drawn(dtype, vocab)

        def tiled(hidden, table):
            mean, is_hit = tiled_cross_entropy(
                hidden, table, labels, mask, train=True, tile_size=tile_size, **options
            )
            return 3 * mean.total, (mean.count, is_hit)

        def of_optax(hidden, table):
            total, is_hit = plain(hidden, table, labels, mask, **options)
            return 3 * total, (mask, is_hit)

        both = []
        for loss in (tiled, of_optax):
            value = jax.value_and_grad(loss, (0, 1), has_aux=True)
            both.append(jax.tree.leaves(jax.jit(value)(hidden, table)))
        for got, want in zip(*both, strict=True):
            np.testing.assert_allclose(got, want, rtol=rtol, atol=20 * rtol)
        losses, _ = tiled_cross_entropy(
            hidden, table, labels, train=False, tile_size=tile_size, **options
        )
        want, _ = plain(hidden, table, labels, mask)  # evaluated without the options
        np.testing.assert_allclose(losses[mask].sum(), want, rtol=rtol)


def test_no_array_of_a_step_holds_all_logits_and_no_scatter_makes_a_gradient():
    hidden, table, labels = jnp.ones((4, 64, 8)), jnp.ones((48, 8)), jnp.zeros((4, 64), int)

    def loss(hidden, table):
        return tiled_cross_entropy(hidden, table, labels, train=True, tile_size=32)[0].total

    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, table)
    program = read_program(lowered.compile().as_text())
    shapes = [x.shapes for each in program.computations.values() for x in each.instructions]
    assert 32 * 48 <= max(shape.size for each in shapes for shape in each) < 4 * 64 * 48
    assert "scatter" not in lowered.as_text()


def test_a_label_outside_the_vocabulary_is_nan_unless_it_is_masked_out():
    hidden, table, _, _ = drawn("float32", 11)
    labels = jnp.zeros((3, 7), jnp.int32).at[0, :2].set(jnp.array([-1, 11]))
    losses, _ = tiled_cross_entropy(hidden, table, labels, train=False, tile_size=4)
    assert np.isnan(losses).sum() == 2
    mean, _ = tiled_cross_entropy(hidden, table, labels, train=True, tile_size=4)
    assert np.isnan(mean.total)
    mean, _ = tiled_cross_entropy(hidden, table, labels, labels == 0, train=True)
    assert np.isfinite(mean.total)


MODEL = GPT(vocab_size=24, num_layers=1, num_heads=2, width=16, max_length=8)


def logits_loss(model, batch, train):
    """The loss of a user, who knows no tiles."""
    logits = model(batch["tokens"][:, :-1], train)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return losses, {"accuracy": logits.argmax(-1) == batch["tokens"][:, 1:]}


def tiled_loss(model, batch, train):
    return next_token(model, batch, train, tile_size=5)


PLACED = {name: x for name, x in STRATEGIES.items() if name != "logical"}  # They refuse tiles.


def token_batch(rows=16):
    rng = np.random.default_rng(0)
    mask = rng.random((rows, 8)) < 0.7
    return {"tokens": rng.integers(24, size=(rows, 9)).astype(np.int32), "mask": mask}


@pytest.mark.parametrize(
    "options", swept({**PLACED, "parts": {"strategy": "zero1", "accumulate_steps": 2}}, every=3)
)
@pytest.mark.parametrize("remat", swept(["attention", "blocks", "none"], every=3))
def test_a_gpt_with_tiles_and_remat_trains_on_devices_as_one_device_without(options, remat):
    batch = token_batch()
    ends = []
    in_parts = MODEL.clone(remat=remat), tiled_loss, {"mesh": 4, **options}
    for model, loss, given in (in_parts, (MODEL, logits_loss, {"mesh": 1})):
        ddp = wrapped(model, optax.sgd(0.5), loss, **given)
        state, metrics = take_steps(ddp, [batch, batch])
        evaluated = ddp.evaluate(state, [{name: x[:5] for name, x in batch.items()}])
        kept = {name: evaluated[name] for name in ("loss", "accuracy")}
        ends.append(host((ddp.model(state), metrics, kept)))
    for got, want in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_rows_of_padding_do_not_count_and_half_precision_stays_close():
    batch = {name: x[:6] for name, x in token_batch().items()}
    ddp, alone = (wrapped(MODEL, loss=tiled_loss, mesh=mesh) for mesh in (4, 1))
    (_, padded), (_, want) = (
        take_steps(each, [each.pad(batch) if each is ddp else batch]) for each in (ddp, alone)
    )
    assert float(padded["count"]) == float(want["count"]) == batch["mask"].sum()
    assert padded["loss"] == pytest.approx(float(want["loss"]), rel=1e-6)
    _, metrics = take_steps(wrapped(MODEL, loss=tiled_loss, precision="bfloat16"), [batch])
    assert metrics["loss"] == pytest.approx(float(want["loss"]), rel=2**-6)


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_tiles_add_no_collective(strategy):
    found = []
    for loss in (tiled_loss, logits_loss):
        lowered = wrapped(MODEL, loss=loss, mesh=4, strategy=strategy).steps.lower(token_batch())
        sent = collectives(read_program(lowered.as_text("hlo")))
        found.append(sorted((x.op, x.bytes) for x in sent))
    assert found[0] == found[1]
