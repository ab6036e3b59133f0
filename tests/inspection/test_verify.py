"""`jddp.verify`: what it passes, and the mistakes that it finds and names."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from sweeps import swept
from tiny import MLP, MODELS, NUM_CLASSES, ConvNet, Of, loss_fn, make_batch, wrapped

import jddp
from jddp.commands.checks import verify_command as main
from jddp.ground.errors import UsageError
from jddp.inspection.verification.findings import MICRO_BATCHES


def verified(model=None, loss=loss_fn, batch=None, optimizer=None, **options):
    batch = make_batch() if batch is None else batch
    return jddp.verify(model or MLP(), optimizer or optax.adam(1e-3), loss, batch, **options)


DIVIDED = ("zero1", "fsdp", jddp.FSDP(group_size=4), jddp.FSDP(group_size=2))
PASSING = [("conv", 0.0, "ddp"), ("nnx", 0.3, "ddp"), ("transformer", 0.3, "ddp")]
PASSING += [("mlp", rate, x) for x in (jddp.LogicalReplicas(8), *DIVIDED) for rate in (0.0, 0.2)]


@pytest.mark.parametrize("name, dropout_rate, strategy", swept(PASSING, every=3))
def test_models_pass_with_and_without_random_numbers(name, dropout_rate, strategy):
    model, batch = MODELS[name](dropout_rate=dropout_rate), make_batch(masked=True)
    report = verified(model, batch=batch, strategy=strategy)
    assert report.passed, report
    if isinstance(strategy, jddp.LogicalReplicas):
        assert all(comparison.error == 0 for comparison in report.comparisons), report
    else:
        assert report.is_side_by_side == (dropout_rate > 0)


def test_options_pass_and_coarse_numbers_are_allowed_their_roundings():
    options = {"accumulate_steps": 2, "max_grad_norm": 0.1, "ema_decay": 0.9, "mesh": 4}
    options |= {"batch_norm": jddp.SyncBatchNorm(unbiased=True), "skip_nonfinite": True}
    # An optimizer that draws uses its own key, the same on one device and on many.
    noisy = optax.chain(optax.sgd(0.1), optax.add_noise(0.01, 0.55, 0))
    report = verified(ConvNet(), optimizer=noisy, batch=make_batch(32), **options)
    assert report.passed, report
    assert (report.findings, report.is_side_by_side) == ((MICRO_BATCHES,), False)
    report = verified(MLP(dtype=jnp.bfloat16), reduction="bfloat16")
    assert report.passed, report
    assert {x.allowed for x in report.comparisons} == {8 * 2**-8, 0.05}


def noise(x):
    return x * jax.random.uniform(jax.random.key(0), x.shape)


backward_only = jax.custom_vjp(lambda x: x)
backward_only.defvjp(lambda x: (x, None), lambda _, g: (noise(g),))


@jax.checkpoint
def deep(x):
    branch = functools.partial(lax.cond, True, noise, jnp.copy)
    return lax.scan(lambda x, _: (branch(x), None), x, length=2)[0]


def random_bits(x):
    """Draws nothing, whatever it is called: it makes a key of a key."""
    return x + 0 * jax.random.key_data(jax.random.split(jax.random.key(0))).sum()


DRAWING = {
    "nothing": (lambda x: x, False),
    "names and keys": (random_bits, False),
    "forward": (noise, True),
    "backward": (backward_only, True),
    "in a branch in a loop": (deep, True),
    "a primitive of its own": (lambda x: x * jax.random.gamma(jax.random.key(0), x), True),
    "of the device": (lambda x: x * lax.rng_uniform(0.0, 1.0, x.shape), True),
    "of a generator": (
        lambda x: x + 0 * lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), x.shape)[1],
        True,
    ),
}


@pytest.mark.parametrize("function, draws", DRAWING.values(), ids=DRAWING)
def test_a_step_draws_if_its_loss_does_forward_or_backward(function, draws):
    def loss(model, batch, train):
        return jax.jit(function)(loss_fn(model, batch, train)[0])

    assert wrapped(loss=loss).steps.planned(make_batch()).uses_rng == draws


def of_losses(function):
    """A loss that is a function of all losses, and of the batch."""
    return {"loss": lambda model, batch, train: function(loss_fn(model, batch, train)[0], batch)}


def rows_against_rows(model, batch, train):
    features = model(batch["x"], train)
    labels = jnp.arange(len(features))
    return optax.softmax_cross_entropy_with_integer_labels(features @ features.T, labels)


def own_norm(m, x, train):
    """Normalises with what it keeps itself, and knows nothing of replicas."""
    running = m.variable("running", "mean", jnp.zeros, x.shape[-1:])
    mean = x.mean(0) if train else running.value
    if train and not m.is_initializing():
        running.value = 0.9 * running.value + 0.1 * mean
    return nn.Dense(NUM_CLASSES)(jnp.tanh(x - mean[None]))


SUM = of_losses(lambda losses, _: losses.sum())
MASKED = of_losses(lambda losses, batch: jnp.average(losses, weights=batch["mask"] + 1e-9))
REPLICA = of_losses(lambda losses, _: losses * (1.0 + lax.axis_index(jddp.AXIS)))
ONE_KEY = of_losses(lambda losses, _: losses + jax.random.normal(jax.random.key(0), losses.shape))
LOCAL, BROADCAST = ({"model": ConvNet(), "batch_norm": mode} for mode in ("local", "broadcast"))
OWN = {"model": Of(own_norm), "state": {"running": "mean"}}
WRONG = {
    "a sum": (SUM, "is a sum over rows: the loss of the whole batch is 8 times"),
    "a mean under a mask": (
        MASKED | {"batch": make_batch(masked=True)},
        "all replicas count alike, whatever the weights",
    ),
    "local statistics": (LOCAL, "'local': each replica normalises with statistics of its own"),
    "broadcast statistics": (BROADCAST, "'broadcast': each"),
    "own statistics": (OWN, "state: a layer that normalises .* the state of its replica"),
    "coupled examples": ({"loss": rows_against_rows}, "The loss couples examples"),
    "the replica": (REPLICA, r"which replica it runs on \(lax.axis_index\)"),
}


@pytest.mark.parametrize("given, message", swept(WRONG, every=4))
def test_what_is_not_one_device_is_found_and_named(given, message):
    report = verified(**given)
    assert not report.passed
    (finding,) = report.findings
    assert re.search(message, finding), report
    assert "<- differs" in str(report)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr("jddp.inspection.verification.verify.platform", lambda mesh: "gpu")


def test_products_are_compared_exactly_on_a_gpu_which_is_told_unless_training_does_so_too(gpu):
    def loss(*given):
        seen.add(jax.config.jax_default_matmul_precision)
        return loss_fn(*given)

    seen = set()
    (finding,) = verified(loss=loss).findings
    assert "highest" in seen
    assert "Training will use the device's default, TF32" in finding
    with jax.default_matmul_precision("highest"):
        assert verified(loss=loss).findings == ()


def test_products_of_a_precision_that_the_model_names_are_allowed_its_roundings(gpu):
    report = verified(Of(lambda m, x, train: nn.Dense(NUM_CLASSES, precision="default")(x)))
    assert report.passed, report
    assert {x.allowed for x in report.comparisons} == {8 * 2**-11, 0.05}


def test_what_is_not_finite_on_both_is_named_and_nothing_else_guessed():
    report = verified(loss=lambda *given: loss_fn(*given)[0] * jnp.nan)
    assert not report.passed
    (finding,) = report.findings
    assert finding.startswith("Not finite, on many devices and on one: loss, the gradient of Dense")
    assert max(map(len, finding.splitlines())) <= 80


@pytest.mark.slow
def test_random_numbers_of_the_host_or_of_one_key_are_found():
    draw = np.random.default_rng().uniform
    assert "Two traces" in verified(loss=lambda *given: loss_fn(*given)[0] * draw(1, 2)).findings[0]
    assert "not from the key of the step" in verified(**ONE_KEY).findings[0]


def test_the_worst_leaf_is_named():
    def loss(model, batch, train):
        losses, _ = loss_fn(model, batch, train)
        bias = model.variables["params"]["Dense_1"]["bias"]
        return losses + bias.sum() * jax.lax.axis_index(jddp.AXIS)

    report = verified(loss=loss, optimizer=optax.sgd(0.1))
    apart = {x.what: x.leaf for x in report.comparisons if not x.passed}
    assert apart == {"gradients": "Dense_1/bias", "update": "Dense_1/bias"}


def test_what_cannot_be_compared_is_refused():
    for options, message in (
        ({"mesh": 1}, "there is only one"),
        ({"batch_norm": jddp.SyncBatchNorm(group_size=2)}, "one device cannot have"),
        ({"strategy": jddp.LocalSteps(2)}, "LocalSteps"),
    ):
        with pytest.raises(UsageError, match=message):
            verified(ConvNet(), **options)


JOB = ["model.name=mlp", "data.global_batch_size=16", "mesh.num_devices=4"]


@pytest.mark.slow
def test_a_job_is_verified_from_the_command_line(capsys):
    warm = ["optimizer.warmup_steps=50", "train.num_steps=5", "optimizer.learning_rate=0.02"]
    assert main([*JOB, *warm]) == 0
    shown = capsys.readouterr().out
    assert "4 devices vs one, 16 examples: equal within rounding" in shown
    assert re.search(r"^update +\S+ +5.0e-02  \w", shown, re.M)  # at the peak of the schedule
    assert main([*JOB, "model.name=cnn", "ddp.batch_norm=local"]) == 76
    assert "NOT equal" in capsys.readouterr().out
    assert main(["--confi", "x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
