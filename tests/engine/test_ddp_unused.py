"""Parameters that no gradient reaches: zero, skip, error; PyTorch DDP's cases of them (UNU)."""

import jax
import jax.numpy as jnp
import judge
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from judge import WIDTH, beside_one_device, host, in_both_places, make_rows, start, wrapped
from sweeps import swept
from tiny import Of, take_steps

from jddp.ground.errors import ConfigError


class Branch(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.param("scale", nn.initializers.ones, (WIDTH,))
        return nn.tanh(nn.Dense(WIDTH, name="dense")(x))


def sometimes(m, x):
    """UNU-8: some parameters, here and there, in layers that are used or not."""
    x = Branch(name="branch")(x)
    Branch(name="side")(x)
    m.param("alone", nn.initializers.ones, (5,))
    m.sow("intermediates", "looked_at", nn.Dense(2, name="probe")(x))
    return nn.Dense(1, name="last")(x)[:, 0]


SOMETIMES = Of(sometimes)


UNUSED = ("alone", "branch/scale", "probe/bias", "probe/kernel")
UNUSED += ("side/dense/bias", "side/dense/kernel", "side/scale")


def is_unused(path):
    names = [str(getattr(entry, "key", getattr(entry, "name", ""))) for entry in path]
    return "/".join(filter(None, names)).endswith(UNUSED)  # without numbers of lists


def adamw(**options):
    # A large epsilon: else it makes whole updates of the rounding of gradients near zero.
    return optax.adamw(0.1, eps=1e-2, weight_decay=0.5, **options)


def test_unused_parameters_get_zeros_as_on_one_device():
    """UNU-5: which decays them, as one device does."""
    ddp, state = beside_one_device(SOMETIMES, optimizer=adamw(), rtol=1e-4)
    assert ddp.plan.unused == UNUSED
    first = start(ddp, make_rows()).params["alone"]
    np.testing.assert_allclose(state.params["alone"], (1 - 0.1 * 0.5) ** 2 * first, rtol=1e-6)


@in_both_places
def test_unused_parameters_are_refused_with_all_their_names(place):
    """UNU-8, UNU-7: before anything is compiled, and no used one is named."""
    with pytest.raises(ConfigError, match=f"^No gradient reaches {', '.join(UNUSED)}. Use them"):
        wrapped(SOMETIMES, unused_parameters="error", **place).init(0, make_rows())


@in_both_places
def test_a_gradient_that_a_custom_rule_makes_without_the_cotangent_is_averaged(place):
    add_gradient = jax.custom_vjp(lambda x, scale: x)
    add_gradient.defvjp(lambda x, scale: (x, x.sum()), lambda total, g: (g, total))

    def balanced(m, x):
        return add_gradient(judge.Net(name="net")(x), m.param("scale", nn.initializers.ones, ()))

    ddp = wrapped(Of(balanced), optimizer=optax.sgd(1.0), **place)
    state = start(ddp, make_rows())
    outputs, before = Of(balanced).apply(ddp.model(state), make_rows()["x"]), state.params["scale"]
    want = float(before - outputs.mean())
    state, _ = ddp.step(state, make_rows())
    judge.assert_same_on_all_devices(state)
    np.testing.assert_allclose(state.params["scale"], want, rtol=1e-5)


def by_layer(params):
    return {name: "slow" if name in ("last", "side") else "fast" for name in params}


PAIR = {"slow": adamw(), "fast": optax.sgd(0.1, momentum=0.9)}
GROWING = optax.GradientTransformation(  # a list of arrays for each parameter
    lambda params: jax.tree.map(lambda x: [x, x], params),
    lambda grads, state, params=None: (grads, jax.tree.map(lambda x: x + 1, state)),
)
OPTIMIZERS = {
    "lists": optax.chain(GROWING, adamw()),
    "adamw with a schedule": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(mu_dtype=jnp.bfloat16),
        optax.add_decayed_weights(0.5),
        optax.scale_by_schedule(optax.linear_schedule(-0.1, -0.01, 10)),
    ),
    "multi_transform by layer": optax.multi_transform(PAIR, by_layer),
    "adafactor": optax.adafactor(0.1, weight_decay_rate=0.5, min_dim_size_to_factor=2),
    "muon": optax.contrib.muon(0.1, weight_decay=0.5),  # keeps three numbers of its own
    "lbfgs": optax.chain(optax.scale_by_lbfgs(memory_size=2), optax.scale(-0.1)),  # and two
}


@pytest.mark.parametrize("name", swept([*OPTIMIZERS], every=4))
def test_every_optimizer_leaves_skipped_parameters_and_their_state_alone(name):
    ddp = wrapped(SOMETIMES, optimizer=OPTIMIZERS[name], unused_parameters="skip", mesh=2)
    state = start(ddp, make_rows())
    first = host((state.params, state.opt_state))
    state, _ = take_steps(ddp, [make_rows(seed=seed) for seed in range(2)], state)
    trees = map(judge.leaves_with_path, (first, (state.params, state.opt_state)))
    for (path, before), (_, after) in zip(*trees, strict=True):
        if is_unused(path) or path[0].idx == 0:
            assert np.array_equal(before, after) == is_unused(path), jax.tree_util.keystr(path)


class Aliases(nnx.Module):
    def __init__(self, rngs):
        self.used = nnx.Linear(WIDTH, 1, rngs=rngs)
        self.one = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.other = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.other.kernel = self.one.kernel

    def __call__(self, x):
        return self.used(x)[:, 0]


def test_an_unused_weight_of_two_names_is_named_once():
    ddp, _ = beside_one_device(Aliases(nnx.Rngs(0)), places=["flat-ready"])
    assert ddp.plan.unused == ("one/bias", "one/kernel", "other/bias")


def extra(m, batch):
    extra = nn.Dense(1, name="extra")
    y = nn.Dense(1, name="always")(batch["x"])
    if "extra" in batch or m.is_initializing():
        y = y + extra(batch["x"]) * ("extra" in batch)
    return y[:, 0]


EXTRA = Of(extra)


def of_batch(model, batch):
    return (model(batch) - batch["y"]) ** 2


WITHOUT, WITH = make_rows(), {**make_rows(seed=1), "extra": np.ones(16)}


@pytest.mark.parametrize("batches", [[WITHOUT, WITH, WITHOUT], [WITH, WITHOUT, WITH]])
@in_both_places
def test_what_other_batches_use_is_averaged_too(place, batches):
    """UNU-10, UNU-4: another form of batch is another trace, and may use other parameters."""
    ddp, _ = judge.hold(EXTRA, of_batch, batches, mesh=4, **place)
    assert bool(ddp.plan.unused) == (batches[-1] is WITHOUT)


@in_both_places
def test_what_other_batches_use_is_skipped_no_longer_and_what_they_do_not_use_is_refused(place):
    """UNU-4, UNU-10: "later reuse is right"; under "error" a second form of batch is held too."""
    options = {"optimizer": optax.sgd(0.1), **place}
    ddp = wrapped(EXTRA, of_batch, unused_parameters="skip", **options)
    state = start(ddp, WITHOUT)
    first = host(state.params["extra"]["kernel"])
    for batch in (WITHOUT, WITH):
        state, _ = ddp.step(state, batch)
        assert np.array_equal(state.params["extra"]["kernel"], first) == (batch is WITHOUT)
    ddp = wrapped(EXTRA, of_batch, unused_parameters="error", **options)
    state, _ = ddp.step(start(ddp, WITH), WITH)
    with pytest.raises(ConfigError, match="^No gradient reaches extra/bias, extra/kernel"):
        ddp.step(state, WITHOUT)


def test_an_unused_parameter_is_not_taken_for_what_an_optimizer_calls_alike():
    def counting(m, x):
        m.param("count", nn.initializers.ones, ())  # as optimizers call their updates
        return nn.Dense(1, name="last")(x)[:, 0]

    ddp = wrapped(Of(counting), optimizer=optax.adam(0.1), unused_parameters="skip")
    state = start(ddp, make_rows())
    before = float(state.params["count"])
    state, _ = take_steps(ddp, [make_rows(seed=seed) for seed in range(2)], state)
    assert ddp.plan.unused == ("count",)
    assert state.opt_state[0].count == 2
    assert state.params["count"] == before
