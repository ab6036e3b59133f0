"""fp8 layers: their scales and histories are overwritten by gradients, as by Flax's TrainState."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from tiny import take_steps

import jddp

OWG = "_overwrite_with_gradient"
STEPS = 3


def op(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the older op, which stays in use
        return kind(amax_history_length=4)


class Mlp(nn.Module):
    kind: type = nn.Fp8DirectDotGeneralOp

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, dot_general_cls=functools.partial(op, self.kind))
        return dense(16)(nn.gelu(dense(16)(x)))


def nnx_mlp():
    """An NNX module around Linen's fp8 layers, as there are none of its own."""
    return nnx.bridge.ToNNX(Mlp(), rngs=nnx.Rngs(0)).lazy_init(jnp.zeros((1, 8)))


def loss_fn(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)


def make_batch(seed):
    rng = np.random.default_rng(seed)
    # Rows of very different sizes: the largest is on one replica, in its last or first micro-batch.
    x = rng.normal(size=(16, 8)) * np.geomspace(0.01, 10, 16)[:: (-1) ** seed, None]
    return {"x": x.astype(np.float32), "y": rng.normal(size=(16, 16)).astype(np.float32)}


def trained(model=None, **options):
    ddp = jddp.DataParallel(model or Mlp(), optax.adam(1e-2), loss_fn, **options)
    state, _ = take_steps(ddp, [make_batch(seed) for seed in range(STEPS)])
    return jax.device_get(state.replace(key=None))


def scales_in(tree):
    """The scales among histories, which have moved; of two layers with three operands each."""
    scales = [x for x in jax.tree.leaves(tree) if x.shape == (1,)]
    assert len(scales) == 6
    assert all(x > 0 and x != 1 for x in scales)


def close(got, want):
    # Sums over 16 rows in another order, over three steps of Adam.
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-4), got, want)


@functools.cache
def by_flax(kind):
    """Flax's own TrainState on the whole batch."""
    model = Mlp(kind)
    state = jddp.DataParallel(model, optax.adam(1e-2), loss_fn, mesh=1).init(0, make_batch(0))
    params = {"params": state.params, OWG: state.model_state[OWG]}
    flax = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    @jax.jit
    @jax.grad
    def gradient(params, batch):
        return loss_fn(functools.partial(model.apply, params), batch).sum()

    for seed in range(STEPS):
        grads = gradient(flax.params, make_batch(seed))
        # Amax histories are those of a sum of losses, and so of any number of replicas.
        grads["params"] = jax.tree.map(lambda g: g / 16, grads["params"])
        flax = flax.apply_gradients(grads=grads)
    return jax.device_get(flax.params)


OPTIONS = {
    "plain": {},
    "older op": {"model": Mlp(nn.Fp8DotGeneralOp)},
    "ready micro-batches": {"overlap": True, "accumulate_steps": 2},
    "ready sharded": {"overlap": True, "shard_optimizer": True},
    "local": {"batch_norm": "local", "skip_nonfinite": True},
    "logical replicas": {"logical_replicas": 8},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_scales_and_histories_are_those_of_flax_s_own_train_state(options):
    state = trained(mesh=4, **options)
    want = by_flax(options.get("model", Mlp()).kind)
    close(state.model_state[OWG], want[OWG])
    close(state.params, want["params"])
    scales_in(state.model_state)


def test_an_nnx_model_with_fp8_layers_keeps_its_scales():
    many, one = (trained(nnx_mlp(), mesh=mesh) for mesh in (4, 1))
    close(many.params, one.params)
    close(many.model_state["rest"], one.model_state["rest"])
    scales_in(many.model_state["rest"])


def test_verify_passes_and_local_steps_say_what_to_name():
    assert jddp.verify(Mlp(), optax.sgd(0.1), loss_fn, make_batch(0)).passed
    options = {"local_steps": jddp.LocalSteps(2), "batch_norm": "local"}
    with pytest.raises(jddp.ConfigError, match=f"{OWG}/.*per_replica="):
        trained(mesh=2, **options)
    kept = trained(mesh=2, per_replica=[OWG], **options).model_state[OWG]["Dense_0"]
    histories = kept["Fp8DirectDotGeneralOp_0"]["input_amax_history"]
    assert not np.array_equal(*histories)  # each of its own rows
