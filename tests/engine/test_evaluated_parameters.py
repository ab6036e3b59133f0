"""A state is evaluated with the parameters that its average or its optimizer is evaluated with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from judge import host
from states import close, equal
from sweeps import swept
from tiny import ConvNet, Of, loss_fn, make_batch, take_steps, wrapped

import jddp
from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.checkpoint.reader import read_arrays
from jddp.checkpoint.weights import read_weights
from jddp.commands.runs import checkpoint_command as main
from jddp.engine.evaluation import optimizer_params
from jddp.engine.state import by_path
from jddp.trainer.watching import KeepBest

BATCHES = [make_batch(seed=seed) for seed in range(4)]
DECAY = 0.75
HALVES = slice(0, 8), slice(8, 16)
PLACES = {
    "sync": {},
    "broadcast": {"batch_norm": "broadcast"},
    "local": {"batch_norm": "local"},
    "logical replicas": {"strategy": jddp.LogicalReplicas(2), "batch_norm": "local"},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp", "skip_nonfinite": True},
    "local steps": {"strategy": jddp.LocalSteps(2), "batch_norm": "local"},
}


averaging = functools.partial(wrapped, ConvNet(), ema_decay=DECAY)


@pytest.mark.parametrize("place", swept([*PLACES], every=2))
def test_batch_statistics_are_averaged_with_the_parameters(place):
    """The judge averages by hand what the state holds after each step."""
    ddp = averaging(**PLACES[place])
    state = ddp.init(0, BATCHES[0])
    want = host((state.params, state.model_state))
    for batch in BATCHES:
        state, _ = ddp.step(state, batch)
        now = host((state.params, state.model_state))
        want = jax.tree.map(lambda a, x: DECAY * a + (1 - DECAY) * x, want, now)
    got = host(ddp.model(state, "ema"))
    want = {"params": want[0], **want[1]}
    close(got, jax.tree.map(lambda x, one: x.mean(0) if x.ndim > one.ndim else x, want, got))
    plain = wrapped(ConvNet(), batch_norm="broadcast")
    alone = plain.init(0, BATCHES[0], params=got)
    assert ddp.evaluate(state, BATCHES, "ema") == pytest.approx(plain.evaluate(alone, BATCHES))
    equal(ddp.model(state)["params"], ddp.model(state, "params")["params"])


def test_a_checkpoint_without_averaged_statistics_resumes_from_the_raw_ones(tmp_path):
    """As versions have written it that averaged parameters alone."""
    ddp = averaging(batch_norm="local")
    state, _ = ddp.step(ddp.init(0, BATCHES[0]), BATCHES[0])
    older = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    layouts = ddp.steps.layouts(state).replace(ema_state=None)
    older.save(1, state.replace(ema_state=None), {}, layouts)
    older.close()
    restored, _ = jddp.Checkpoints(tmp_path / "checkpoints").restore(ddp)
    equal(restored.ema_state, state.model_state)
    statistics = host(state.model_state)  # the step takes both
    restored, _ = ddp.step(restored, BATCHES[1])
    want = jax.tree.map(
        lambda a, x: DECAY * a + (1 - DECAY) * x, statistics, host(restored.model_state)
    )
    close(restored.ema_state, want)
    opened = jddp.open_run(tmp_path, model=ConvNet(), loss_fn=loss_fn, params="ema")
    means = jax.tree.map(lambda x: x.mean(0), statistics)
    close(opened._ddp.model(opened.state, "ema")["batch_stats"], means["batch_stats"])


FREE = optax.contrib.schedule_free_sgd(0.5, warmup_steps=2)


OPTIMIZERS = {
    "ddp": (FREE, {}),
    "zero1": (optax.contrib.schedule_free_adamw(0.1), {"strategy": "zero1"}),
    "fsdp": (optax.contrib.schedule_free_adamw(0.1), {"strategy": "fsdp"}),
    "in a chain": (optax.chain(optax.clip(0.1), FREE), {"max_grad_norm": 0.5}),
    "every second step": (optax.MultiSteps(FREE, 2), {}),
    "hyperparameters": (
        optax.inject_hyperparams(optax.contrib.schedule_free_sgd)(learning_rate=0.5),
        {"skip_nonfinite": True},
    ),
}


def net(m, x):
    """With a bias of three numbers, which two replicas do not divide, and a parameter of one."""
    return nn.Dense(3)(x) * m.param("scale", nn.initializers.ones, ())


def squares(model, batch):
    return ((model(batch["x"]) - batch["y"][:, None]) ** 2).mean(-1)


def by_optax(tx, params, batches):
    """Plain steps on one device; the parameters, and those that optax evaluates."""
    opt_state = tx.init(params)
    model = Of(net)

    def loss(params, batch):
        return squares(lambda x: model.apply({"params": params}, x), batch).mean()

    for batch in batches:
        updates, opt_state = tx.update(jax.grad(loss)(params, batch), opt_state, params)
        params = optax.apply_updates(params, updates)
    is_free = lambda x: isinstance(x, optax.contrib.ScheduleFreeState)  # noqa: E731
    (free_state,) = filter(is_free, jax.tree.leaves(opt_state, is_leaf=is_free))

    def evaluated(y, z):
        masked = isinstance(z, optax.MaskedNode)
        return y if masked else optax.contrib.schedule_free_eval_params(free_state._replace(z=z), y)

    return params, jax.tree.map(evaluated, params, free_state.z)


@pytest.mark.parametrize("name", swept([*OPTIMIZERS], every=2))
def test_schedule_free_optimizers_are_evaluated_at_their_average(name):
    tx, options = OPTIMIZERS[name]
    ddp = wrapped(Of(net), tx, squares, **options)
    state = ddp.init(0, BATCHES[0])
    clipped = optax.chain(optax.clip_by_global_norm(0.5), tx) if "max_grad_norm" in options else tx
    stepped, want = by_optax(clipped, host(state.params), BATCHES)
    state, _ = take_steps(ddp, BATCHES, state)
    close(state.params, stepped)
    close(ddp.model(state)["params"], want, rtol=1e-4)  # differences, times nine
    assert np.abs(want["Dense_0"]["kernel"] - stepped["Dense_0"]["kernel"]).max() > 0.001
    # With parameters that somebody has put into the state, nothing is converted again.
    given = state.replace(params=jax.tree.map(jnp.asarray, want), opt_state=())
    rows = [make_batch(5, seed=9)]
    assert ddp.evaluate(state, rows) == pytest.approx(ddp.evaluate(given, rows), rel=1e-4)
    outputs = Of(net).apply({"params": want}, rows[0]["x"])
    np.testing.assert_allclose(ddp.predict(state, rows), outputs, rtol=1e-3, atol=1e-5)


def test_replicas_of_local_steps_are_evaluated_at_the_mean_of_their_averages():
    ddp = wrapped(Of(net), FREE, squares, strategy=jddp.LocalSteps(8))
    state = ddp.init(0, BATCHES[0])
    first = host(jax.tree.map(lambda x: x[0], state.params))
    state, _ = take_steps(ddp, BATCHES, state)
    halves = [[{k: x[rows] for k, x in b.items()} for b in BATCHES] for rows in HALVES]
    each = [by_optax(FREE, first, batches)[1] for batches in halves]
    close(ddp.model(state)["params"], jax.tree.map(lambda a, b: (a + b) / 2, *each), rtol=1e-4)


def test_a_run_of_a_schedule_free_optimizer_is_the_same_when_it_is_opened_and_exported(tmp_path):
    tx, rows = optax.contrib.schedule_free_adamw(0.1), [make_batch(6, seed=9)]
    ddp = wrapped(Of(net), tx, squares, strategy="zero1")
    options = {"run_dir": tmp_path / "run", "callbacks": [KeepBest("loss", mode="min")]}
    run = jddp.fit(ddp, BATCHES, num_steps=4, evaluate=rows, **options)
    _, want = by_optax(tx, host(ddp.init(0, BATCHES[0]).params), BATCHES)
    outputs = Of(net).apply({"params": want}, rows[0]["x"])
    loss = ((outputs - rows[0]["y"][:, None]) ** 2).mean()
    assert run.eval_metrics["loss"] == pytest.approx(float(loss), rel=1e-4)
    for checkpoint in (None, "best"):
        given = {"model": Of(net), "loss_fn": squares}
        opened = jddp.open_run(tmp_path / "run", **given, checkpoint=checkpoint)
        assert opened.evaluate(rows)["loss"] == pytest.approx(float(loss), rel=1e-4)
        np.testing.assert_allclose(opened.predict(rows), outputs, rtol=1e-3, atol=1e-5)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "w.safetensors")]) == 0
    close(read_weights(tmp_path / "w.safetensors")["params"], want, rtol=1e-4)
    close(read_weights(tmp_path / "run")["params"], want, rtol=1e-4)
    raw = read_arrays(tmp_path / "run" / "checkpoints" / "4", ["params"])
    equal(raw["params/Dense_0/kernel"], run.state.params["Dense_0"]["kernel"])


def test_sam_is_evaluated_with_the_parameters_before_its_adversarial_step():
    uphill = optax.chain(optax.contrib.normalize(), optax.sgd(0.5))
    tx = optax.chain(optax.contrib.sam(optax.sgd(0.25), uphill))
    params = {"w": jnp.float32([3, 4])}
    opt_state = tx.init(params)
    for stepped, evaluated in (([3.3, 4.4], [3, 4]), ([2.175, 2.9], [2.175, 2.9])):
        grads = params  # of half the squares; the second from the adversarial parameters
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params["w"], stepped, rtol=1e-6)
        found = optimizer_params(params, by_path(opt_state))["w"]
        np.testing.assert_allclose(found, evaluated, rtol=1e-6)


def test_parameters_that_have_the_names_of_such_a_state_are_evaluated_as_they_are():
    params = {name: jnp.ones(2) for name in ("z", "b1", "weight_sum", "cache", "steps_since_sync")}
    found = optimizer_params(params, by_path(optax.adam(0.1).init(params)))
    equal(found, params)
