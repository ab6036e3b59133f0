"""Float16 with a loss scale, by which nothing else changes; and double precision."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from judge import PLACES, assert_same_on_all_devices, joined
from runs import records
from states import assert_same, close, copied
from sweeps import swept
from tiny import MLP, ConvNet, Of, loss_fn, make_batch

import jddp
from jddp.config.files import load_config
from jddp.config.keys import ConfigMistakes
from jddp.engine.guard import FIRST, GROWTH_INTERVAL, LossScale, adjust
from jddp.ground.errors import ConfigError, NumericsError

FIRST_SCALE = LossScale(jnp.float32(FIRST), jnp.int32(0))
HALF = MLP(dtype=jnp.float16)
# Eleven bits, of which a gradient loses one in each of some eight operations.
HALF_ROUNDING = 8 * 2.0**-11
SMALL = 2.0**-26


def wrapped(model=HALF, loss=loss_fn, **options):
    options = {"mesh": 4, "precision": jddp.Precision(loss_scale="dynamic"), **options}
    return jddp.DataParallel(model, options.pop("optimizer", optax.sgd(0.1)), loss, **options)


def small(model, batch, train):
    """A loss whose gradients are below half of the smallest number of float16, 2^-24."""
    return SMALL * loss_fn(model, batch, train)[0]


def weighed(model, batch, train):
    """A loss of which each row may have a weight; its value stays in the range of float32."""
    return batch["weight"] * loss_fn(model, batch, train)[0]


def with_weights(batch, weight=1.0, row=slice(None)):
    """A copy with weights of 1, but for some rows."""
    weights = np.ones(len(batch["y"]), np.float32)
    weights[row] = weight
    return {**batch, "weight": weights}


def with_scale(state, scale, num_good=0):
    """The state with another loss scale."""
    old = state.comm_state.loss_scale
    numbers = LossScale(jnp.float32(scale), jnp.int32(num_good))
    new = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), numbers, old)
    return state.replace(comm_state=dataclasses.replace(state.comm_state, loss_scale=new))


def scale_of(state):
    """The scale and the good steps, which all devices must have alike."""
    found = state.comm_state.loss_scale
    assert_same_on_all_devices(state.replace(params=found, model_state=(), opt_state=()))
    return float(found.scale), float(found.num_good)


def test_gradients_that_float16_would_lose_are_those_of_float32():
    batch = make_batch(32)

    def gradients(model, loss_scale, **options):
        ddp = wrapped(model, small, precision=jddp.Precision(loss_scale=loss_scale), **options)
        state = ddp.init(0, batch)
        if loss_scale == "dynamic":
            state = with_scale(state, 2.0**20)  # where it would grow to
        return jax.device_get(ddp.gradients(state, batch)[0])

    want = gradients(MLP(), None)
    assert optax.tree.norm(gradients(HALF, None)) == 0
    atol = HALF_ROUNDING * max(np.abs(x).max() for x in jax.tree.leaves(want))
    for scale, options in (
        (2.0**20, PLACES["leaf-end"]),
        ("dynamic", {**PLACES["flat-ready"], "accumulate_steps": 2}),
        ("dynamic", {"reduction": jddp.Reduction(wire_dtype="float16", layout="flat")}),
    ):
        close(gradients(HALF, scale, **options), want, rtol=0, atol=atol)


def test_parameters_of_float16_have_a_scale_that_a_hook_does_not_see():
    half = Of(lambda m, x: x * m.param("w", nn.initializers.constant(0.5), (), jnp.float16))

    def loss(model, batch):
        return 2.0**-30 * (2.0**10 * model(batch["x"])).astype(jnp.float32)

    batch = {"x": np.full((8, 1), 2.0**4, np.float16)}
    want = 2.0**-16  # which float16 holds; what leads to it is smaller
    mean = jddp.CommHook(lambda plan: (), lambda b, s, axis: (jax.lax.pmean(b, axis), s))
    for scale, hook, found in ((None, None, 0.0), (2.0**12, None, want), (2.0**12, mean, want)):
        options = {"reduction": jddp.Reduction(hook=hook)}
        ddp = wrapped(half, loss, mesh=2, precision=jddp.Precision(loss_scale=scale), **options)
        assert float(ddp.gradients(ddp.init(0, batch), batch)[0]["w"]) == found, (scale, hook)


OVERFLOWING = {
    "end": (15, {"ema_decay": 0.9}),
    "ready": (0, joined(PLACES["flat-ready"], {"reduction": "float16"})),
    "sharded": (15, {"strategy": "zero1", "max_grad_norm": 1.0}),
    "logical replicas": (0, {"strategy": jddp.LogicalReplicas(16), "batch_norm": "local"}),
    "local steps": (15, {"strategy": jddp.LocalSteps(every=3), "batch_norm": "local"}),
}


@pytest.mark.parametrize("row, options", swept(OVERFLOWING, every=3))
def test_where_one_replica_overflows_all_skip_and_halve(row, options):
    ddp = wrapped(ConvNet(dtype=jnp.float16), weighed, **options, optimizer=optax.adam(0.01))
    first, batch = with_weights(make_batch()), with_weights(make_batch(), 2.0**9, row)
    state = ddp.init(0, first)
    for given, skipped, want in ((first, 0, (2.0**16, 1)), (batch, 1, (2.0**15, 0))):
        before = copied(state)
        state, metrics = ddp.step(state, given)
        assert np.isfinite(metrics["loss"])
        assert (float(metrics["loss_scale"]), float(metrics["skipped"])) == (2.0**16, skipped)
        assert scale_of(state) == want
    kept = state.replace(step=before.step, skipped=before.skipped, comm_state=before.comm_state)
    assert_same(kept, before)
    while scale_of(state)[1] == 0:
        state, metrics = ddp.step(state, batch)
        assert float(metrics["loss_scale"]) > 1
    assert scale_of(state) == (float(metrics["loss_scale"]), 1)
    assert 1 < float(metrics["loss_scale"]) < 2.0**15


def fit(batches, tmp_path, num_steps, *, rate=1e-4, mesh=4, loss=weighed, **plan):
    ddp = wrapped(loss=loss, optimizer=optax.sgd(rate), mesh=mesh)
    plan = {"run_dir": tmp_path, "log_every_steps": 1, **plan}
    return jddp.fit(ddp, batches, num_steps=num_steps, **plan)


def test_a_checkpoint_without_a_scale_does_not_resume_with_one(tmp_path):
    for scale, num_steps in ((None, 1), ("dynamic", 2), (2.0**8, 2)):
        ddp, batches = wrapped(precision=jddp.Precision(loss_scale=scale)), [make_batch()] * 2
        plan = {"num_steps": num_steps, "save_every_steps": 1, "run_dir": tmp_path}
        if scale == "dynamic":
            with pytest.raises(ConfigError, match="comm_state/loss_scale"):
                jddp.fit(ddp, batches, **plan)
        else:
            assert jddp.fit(ddp, batches, **plan).step == num_steps


def test_steps_that_bring_the_scale_down_do_not_end_a_run(tmp_path):
    batches = [with_weights(make_batch(seed=seed), 2.0**9) for seed in range(16)]
    run = fit(batches, tmp_path, 16, checks=jddp.Checks(max_consecutive_skips=1))
    num_skipped = int(run.state.skipped)
    assert 3 < num_skipped < 12
    found = [(x["loss_scale"], x["skipped"]) for x in records(tmp_path)[:num_skipped]]
    assert found == [(2.0 ** (16 - i), i + 1) for i in range(num_skipped)]


@pytest.mark.parametrize("nan_from, step", [(99, 19), (2, 5)])
def test_gradients_that_no_scale_makes_finite_end_a_run_once_it_is_one(tmp_path, nan_from, step):
    """A loss that is not finite ends it as without a scale."""

    def loss(model, batch, train):
        losses = loss_fn(model, batch, train)[0]
        return batch["weight"] * (losses if nan_from < 99 else jnp.sqrt(0.0 * losses))

    weights = [np.nan if i >= nan_from else 1.0 for i in range(30)]
    batches = [with_weights(make_batch(seed=i), x) for i, x in enumerate(weights)]
    with pytest.raises(NumericsError, match=f"at step {step}, the last of 3 in a row"):
        fit(batches, tmp_path, 30, loss=loss, checks=jddp.Checks(max_consecutive_skips=3))
    report = json.loads((tmp_path / f"nonfinite/step_{step}/report.json").read_text())
    assert (report["metrics"]["loss_scale"] == 1) == (step == report["metrics"]["skipped"] == 19)


def test_a_scale_is_a_power_of_two_or_dynamic_and_stays_between_one_and_two_to_the_24():
    down = up = FIRST_SCALE
    for _ in range(40):
        down, up = (adjust(x, jnp.bool(x is up), interval=1) for x in (down, up))
    assert (float(down.scale), float(up.scale)) == (1, 2.0**24)
    for given in (None, "dynamic", 1, 2.0**24):
        config, _ = load_config([], {"ddp.precision.loss_scale": given})
        assert config.ddp.precision.loss_scale == given
    for given in (0, -2, 0.5, 1000, 2.0**25, float("inf"), float("nan"), True, "static"):
        with pytest.raises(ConfigError, match="loss_scale (is|must be a) .*'dynamic'"):
            wrapped(precision=jddp.Precision(loss_scale=given))
    with pytest.raises(ConfigMistakes, match=r"ddp\.precision\.loss_scale"):
        load_config([], {"ddp.precision.loss_scale": "dynamc"})


def test_a_step_doubles_it_after_two_thousand_good_ones():
    ddp = wrapped()
    state = with_scale(ddp.init(0, make_batch()), 2.0**8, num_good=GROWTH_INTERVAL - 2)
    found = []
    for _ in range(3):
        state, metrics = ddp.step(state, make_batch())
        found.append((float(metrics["loss_scale"]), *scale_of(state)))
    assert found == [(2.0**8, 2.0**8, 1999), (2.0**8, 2.0**9, 0), (2.0**9, 2.0**9, 1)]


RANDOM = np.random.default_rng(0)
BATCH = {"x": RANDOM.normal(size=(24, 3)), "y": RANDOM.normal(size=24)}
MODEL = nn.Dense(1, param_dtype=jnp.float64)


def errors(model, batch):
    return jnp.square(model(batch["x"])[:, 0] - batch["y"])


def loss_in_double(model, batch):
    losses = errors(model, batch)
    mean, large = jddp.Mean(losses, jnp.ones_like(losses)), jnp.full(losses.shape, 2**40)
    metrics = {"mean": mean, "hit": losses > 0.5, "large": jddp.Metric(large, lambda x, _: x)}
    return losses, metrics


IN_DOUBLE = {
    "ZeRO-1": {"strategy": "zero1"},
    "overlap": {"reduction": jddp.Reduction(layout="flat", overlap=True), "accumulate_steps": 2},
    "logical replicas": {"strategy": jddp.LogicalReplicas(4)},
    "a loss scale": {"precision": jddp.Precision(loss_scale="dynamic")},
}


@pytest.mark.parametrize("options", swept(IN_DOUBLE, every=3))
def test_a_step_in_double_precision_is_one_on_one_device(options):
    def loss(params):
        return errors(nn.Dense(1, param_dtype=float).bind({"params": params}), BATCH).mean()

    with jax.enable_x64(True):
        ddp = jddp.DataParallel(MODEL, optax.sgd(0.1), loss_in_double, mesh=2, **options)
        state = ddp.init(0, BATCH)
        params = ddp.model(state)["params"]
        want, grads = jax.value_and_grad(loss)(params)
        params = jax.tree.map(lambda x, grad: x - 0.1 * grad, params, grads)
        evaluated = ddp.evaluate(state, [BATCH])
        state, metrics = ddp.step(state, BATCH)
        named = {name: metrics[name].dtype.name for name in ("loss", "mean", "hit")}
        assert named == dict.fromkeys(named, "float64")
        # A few roundings of 2^-53 each.
        for got in (metrics["loss"], metrics["mean"], evaluated["loss"]):
            np.testing.assert_allclose(float(got), float(want), rtol=1e-14)
        for got, expected in zip(*map(jax.tree.leaves, (state.params, params)), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-14)
        assert evaluated["large"] == 24 * 2**40
