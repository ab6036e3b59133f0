"""Optimizers that need whole matrices, where each replica keeps a part: the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from judge import WIDTH, Either, assert_close, host, make_rows, start, wrapped
from sweeps import swept
from tiny import MODELS as TINY
from tiny import loss_fn, make_batch, take_steps

import jddp
from jddp.checkpoint.checkpoints import CheckpointFolder

# Newton-Schulz multiplies the small singular values of a gradient by hundreds, and with them the
# rounding of sums in another order; of the largest entry, after five steps.
ROUNDING = 2e-5
LAYERS = 3  # which four replicas do not divide


class Block(nn.Module):
    """Two matrices and a bias."""

    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH, use_bias=False)(nn.tanh(nn.Dense(8)(x))), None


class Deep(nn.Module):
    """Layers one by one, or scanned."""

    is_scanned: bool

    @nn.compact
    def __call__(self, x):
        if self.is_scanned:
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(Block, length=LAYERS, **axes)(name="layers")(x, None)
        else:
            for _ in range(LAYERS):
                x, _ = Block()(x, None)
        return nn.Dense(1, name="last")(x)[:, 0]


MODELS = {"scanned": Deep(True), "unrolled": Deep(False)}


def matrices(params):
    """The last two dims of kernels: Adam updates all else."""
    dims = optax.contrib.MuonDimensionNumbers(-2, -1)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: dims if "kernel" in jax.tree_util.keystr(path) else None, params
    )


def muon(**options):
    return optax.contrib.muon(
        0.05, weight_decay=0.1, muon_weight_dimension_numbers=matrices, eps=1e-3, **options
    )


def shampoo():
    """Multiplies G by the sum of G Gᵀ, which it keeps: a square array for each matrix."""

    def init(params):
        return jax.tree.map(
            lambda x: jnp.zeros((*x.shape[:-1], x.shape[max(x.ndim - 2, 0)])), params
        )

    def update(grads, kept, params=None):
        def add(g, square):
            return square + (g * g if g.ndim == 1 else g @ jnp.swapaxes(g, -1, -2))

        def step(g, square):
            if g.ndim == 1:
                return -0.1 * square * g / (1 + square)
            scale = 1 + jnp.trace(square, axis1=-2, axis2=-1)
            return -0.1 * square @ g / scale[..., None, None]

        kept = jax.tree.map(add, grads, kept)
        return jax.tree.map(step, grads, kept), kept

    return optax.GradientTransformation(init, update)


def growing_with_size():
    """Whose first state depends on how large an array is, and whose update does not."""
    adam = optax.adam(1e-3)

    def init(params):
        fill = jax.tree.map(lambda x: jnp.full_like(x, x.size > 9), params)
        return adam.init(params), fill

    def update(grads, state, params=None):
        updates, inner = adam.update(grads, state[0], params)
        return jax.tree.map(jnp.multiply, updates, state[1]), (inner, state[1])

    return optax.GradientTransformation(init, update)


def by_number_of_elements():
    """Whose steps are as long as there are elements of all parameters: of whole ones, not parts."""

    def update(grads, params):
        num = sum(x.size for x in jax.tree.leaves(grads))
        return jax.tree.map(lambda x: -1e-3 * num * x / (jnp.abs(x).max() + 1), grads)

    return optax.stateless(update)


OPTIMIZERS = {
    "muon": muon(),
    "muon and parameters that stay": optax.partition(
        {"moved": muon(), "kept": optax.set_to_zero()},
        lambda params: {name: "kept" if name == "last" else "moved" for name in params},
    ),
    "muon of another first step": muon(preconditioning="schatten"),
    "muon with a rate in its state": optax.inject_hyperparams(
        lambda learning_rate: optax.chain(muon(), optax.scale_by_learning_rate(learning_rate))
    )(learning_rate=-0.5),
    "shampoo": shampoo(),
    "lamb": optax.lamb(0.05, eps=1e-3),
    "adafactor": optax.adafactor(0.05, min_dim_size_to_factor=2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)),
    "by the number of elements": optax.masked(
        by_number_of_elements(), lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    ),
    "growing with size": growing_with_size(),
    "a mask by size": optax.adamw(
        0.05, eps=1e-3, mask=lambda params: jax.tree.map(lambda x: x.size > 9, params)
    ),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.sgd(0.1)),
}
CASES = [(name, model) for name in OPTIMIZERS for model in MODELS]


def trained(model, optimizer, strategy, *, num=5, mesh=4, **options):
    ddp = wrapped(model, optimizer=optimizer, strategy=strategy, mesh=mesh, **options)
    batches = [make_rows(24, seed=i) for i in range(num)]
    state, metrics = take_steps(ddp, batches, start(ddp, batches[0]))
    return ddp, state, host((state.params, state.ema_params, metrics))


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
@pytest.mark.parametrize(("name", "model"), swept(CASES, every=13))
def test_five_steps_are_those_of_one_device_with_whole_arrays(name, model, strategy):
    alone = trained(MODELS[model], OPTIMIZERS[name], "ddp", mesh=1)[2]
    divided = trained(MODELS[model], OPTIMIZERS[name], strategy)[2]
    assert_close(divided, alone, rtol=ROUNDING)


@pytest.mark.parametrize("model", swept([*MODELS], every=2))
def test_each_group_of_replicas_gathers_its_own(model):
    alone = trained(MODELS[model], muon(), "ddp", mesh=1)[2]
    divided = trained(MODELS[model], muon(), jddp.FSDP(group_size=2))[2]
    assert_close(divided, alone, rtol=ROUNDING)


@pytest.mark.parametrize("strategy", swept(["fsdp", "zero1"], every=2))
def test_parameters_and_momentum_without_a_gradient_stay_as_they_are(strategy):
    def of_one_branch(model, batch):
        if model.is_initializing():
            model.b(batch["x"])
        return (model.a(batch["x"]) - batch["y"]) ** 2

    ends = []
    for chosen in ("ddp", strategy):
        ddp = wrapped(
            Either(), of_one_branch, optimizer=muon(), strategy=chosen, unused_parameters="skip"
        )
        state, _ = take_steps(
            ddp, [make_rows(seed=seed) for seed in range(2)], start(ddp, make_rows())
        )
        ends.append(host(state.params))
    first = host(start(ddp, make_rows()).params)
    jax.tree.map(np.testing.assert_array_equal, ends[1]["b"], first["b"])
    assert_close(*ends, rtol=ROUNDING)


@pytest.mark.slow
def test_clipping_micro_batches_and_an_average_are_those_of_one_device():
    options = {"max_grad_norm": 0.1, "ema_decay": 0.9}
    alone = trained(MODELS["scanned"], muon(), "ddp", mesh=1, **options)[2]
    for strategy in ("zero1", "fsdp"):
        _, state, ends = trained(
            MODELS["scanned"], muon(), strategy, accumulate_steps=2, skip_nonfinite=True, **options
        )
        del ends[2]["skipped"]
        assert_close(ends, alone, rtol=ROUNDING)
        assert int(state.skipped) == 0


@pytest.mark.parametrize("model", swept([*MODELS], every=2))
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_a_replica_keeps_its_share_of_the_momentum(strategy, model):
    ddp = wrapped(MODELS[model], optimizer=muon(), strategy=strategy)
    batch = make_rows()
    state = start(ddp, batch)
    arrays = jax.tree.leaves(state.opt_state)
    whole = sum(x.nbytes for x in arrays)
    # All but counts, the three coefficients, and what a bias or its padding needs.
    assert sum(x.addressable_shards[0].data.nbytes for x in arrays) <= whole / 4 + 100


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [muon(), shampoo()], ids=["muon", "shampoo"])
def test_a_checkpoint_resumes_with_any_strategy_on_any_number_of_devices(tmp_path, optimizer):
    batch = make_rows(24)
    alone = wrapped(MODELS["scanned"], optimizer=optimizer, strategy="ddp", mesh=1)
    state = start(alone, batch)
    for step, (strategy, num) in enumerate(
        [("zero1", 8), ("ddp", 2), ("fsdp", 4), ("zero1", 3), ("fsdp", 8)]
    ):
        ddp = wrapped(MODELS["scanned"], optimizer=optimizer, strategy=strategy, mesh=num)
        moving = start(ddp, batch)
        checkpoints = CheckpointFolder(tmp_path, keep=2)
        if step:
            moving = checkpoints.restore(moving, ddp.steps.layouts(moving)).state
        moving, _ = ddp.step(moving, batch)
        state, _ = alone.step(state, batch)
        checkpoints.save(step + 1, moving, {}, ddp.steps.layouts(moving))
        checkpoints.close()
        whole = jax.tree.map(
            lambda x, like: np.asarray(x).ravel()[: like.size].reshape(like.shape),
            moving.opt_state,
            state.opt_state,
        )
        assert_close(whole, host(state.opt_state), rtol=ROUNDING)
        assert_close(host(moving.params), host(state.params), rtol=ROUNDING)


def test_the_program_of_a_run_has_one_digest_with_every_strategy_and_number_of_devices():
    batch, found = make_rows(24), set()
    for strategy, num in (("ddp", 1), ("zero1", 4), ("fsdp", 2)):
        ddp = wrapped(MODELS["scanned"], optimizer=muon(ns_steps=1), strategy=strategy, mesh=num)
        state = ddp.steps.abstract_state(batch)
        found.add(ddp.steps.program(state, batch).digests["optimizer"])
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_verify_holds_it_against_one_device_and_its_replicas_side_by_side(strategy):
    model, batch = TINY["mlp"](dropout_rate=0.2), make_batch()
    report = jddp.verify(model, muon(), loss_fn, batch, strategy=strategy)
    assert report.passed, str(report)
    assert report.is_side_by_side
