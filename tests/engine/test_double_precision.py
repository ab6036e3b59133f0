"""With `jax_enable_x64` losses, metrics and gradients of float64 stay so, in any mode."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from sweeps import swept

import jddp

RANDOM = np.random.default_rng(0)
BATCH = {"x": RANDOM.normal(size=(24, 3)), "y": RANDOM.normal(size=24)}
MODEL = nn.Dense(1, param_dtype=jnp.float64)


def errors(model, x, y):
    return jnp.square(model(x)[:, 0] - y)


def loss_fn(model, batch):
    losses = errors(model, batch["x"], batch["y"])
    mean, large = jddp.Mean(losses, jnp.ones_like(losses)), jnp.full(losses.shape, 2**40)
    metrics = {"mean": mean, "hit": losses > 0.5, "large": jddp.Metric(large, lambda x, _: x)}
    return losses, metrics


OPTIONS = {
    "ZeRO-1": {"strategy": "zero1"},
    "overlap": {"reduction": jddp.Reduction(layout="flat", overlap=True), "accumulate_steps": 2},
    "logical replicas": {"strategy": jddp.LogicalReplicas(4)},
    "a loss scale": {"precision": jddp.Precision(loss_scale="dynamic")},
}


@pytest.mark.parametrize("options", swept(OPTIONS, every=3))
def test_a_step_in_double_precision_is_one_on_one_device(options):
    def loss(params):
        return errors(
            nn.Dense(1, param_dtype=float).bind({"params": params}), *BATCH.values()
        ).mean()

    with jax.enable_x64(True):
        ddp = jddp.DataParallel(MODEL, optax.sgd(0.1), loss_fn, mesh=2, **options)
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
