"""Cases of PyTorch's DDP, as README.md lists them, and models that transform themselves."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import judge
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from judge import WIDTH, Either, Net, in_both_places, joined, make_rows, squares, start, wrapped
from sweeps import swept
from tiny import Of, take_steps

import jddp
from jddp.ground.errors import ConfigError

KERNEL = nn.initializers.normal()

# The place that takes a transformed backward pass apart; the others run it as it is.
judged = functools.partial(judge.beside_one_device, places=["flat-ready"])


class Layer(nn.Module):
    with_unused: bool = False

    @nn.compact
    def __call__(self, x):
        if self.with_unused:
            nn.Dense(3, name="unused")(x)
        return nn.tanh(nn.Dense(WIDTH, name="dense")(x))


class Remat(nn.Module):
    times: int = 1
    with_unused: bool = False
    policy: Any = None

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer, policy=self.policy)(self.with_unused)
        for _ in range(self.times):
            x = layer(x)
        return x.sum(-1)


class RematNnx(nnx.Module):
    def __init__(self, rngs):
        self.first, self.unused = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        layer = nnx.remat(lambda layer, x: nnx.tanh(layer(x)))
        return self.last(layer(self.first, layer(self.first, x)))[:, 0]


def shared(m, x):
    w = m.param("w", KERNEL, (WIDTH, WIDTH))
    once = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
    twice = jax.checkpoint(lambda x, w: jnp.tanh(once(x, w) @ w.T))
    return (twice(once(x, w), w) @ w).sum(-1)


AXES = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}


def scanned(layer):
    layers = nn.scan(lambda layer, x, _: (layer(x), None), length=3, **AXES)
    return Of(lambda m, x: layers(layer(with_unused=True, name="layers"), x, None)[0].sum(-1))


def loops(m, x):
    stack = m.param("stack", KERNEL, (3, WIDTH, WIDTH))
    shared = m.param("shared", KERNEL, (WIDTH, WIDTH))
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w + x @ shared), None), x, stack)
    return jax.lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x @ shared), x).sum(-1)


doubled, tripled = jax.custom_vjp(jnp.sin), jax.custom_jvp(jnp.cos)
doubled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))
tripled.defjvp(lambda x, t: (jnp.cos(x[0]), -3 * jnp.sin(x[0]) * t[0]))
OFTEN = {
    "remat": Remat(policy=jax.checkpoint_policies.dots_saveable),
    "remat twice with unused": Remat(times=2, with_unused=True),
    "remat in remat with unused": Of(lambda m, x: nn.remat(Remat)(times=2, with_unused=True)(x)),
    "remat with a shared weight": Of(shared),
    "remat in NNX with unused": RematNnx(nnx.Rngs(0)),
    "scan with unused": scanned(Layer),
    "custom derivatives": Of(lambda m, x: tripled(doubled(Layer()(x))).sum(-1)),
}
LONG = {
    "scan of remat with unused": scanned(nn.remat(Layer, prevent_cse=False)),
    "lax loops": Of(loops),
    "nn.jit": Of(lambda m, x: nn.jit(Net)()(nn.jit(Layer)()(jax.jit(jnp.sin)(x)))),
    "nn.vmap": Of(lambda m, x: nn.vmap(Net, in_axes=None, axis_size=3, **AXES)()(x).mean(0)),
}


@pytest.mark.parametrize("name", [*OFTEN, *(pytest.param(x, marks=pytest.mark.long) for x in LONG)])
def test_transformed_models_equal_one_device(name):
    ddp, _ = judged((OFTEN | LONG)[name])
    num_unused = 2 * ("with unused" in name)
    assert [path.split("/")[-2] for path in ddp.plan.unused] == ["unused"] * num_unused


def two_losses(y, want):
    return (y - want) ** 2 + jnp.abs(y)


def slope(model, x):
    return jax.grad(lambda x: model(x).sum())(x)


LOSSES = {
    "UNU-12, of two forwards, as a GAN's": lambda m, b: (
        jnp.logaddexp(0, -m(b["x"])) + jnp.logaddexp(0, m(b["x"][:, ::-1]))
    ),
    "NUM-8, two of one forward": lambda m, b: two_losses(m(b["x"]), b["y"]),
    "NUM-9, of a gradient": lambda m, b: squares(m, b) + (slope(m, b["x"]) ** 2).sum(-1),
    "jitted": lambda m, b: jax.jit(jnp.subtract)(m(b["x"]), b["y"]) ** 2,
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_equal_one_device(loss):
    judged(Net(), loss)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Output:
    first: Any
    second: Any


def test_of_nested_outputs_one_may_be_in_the_loss_and_the_other_not():
    """UNU-13: the branch of the other is unused, whatever holds it."""
    branches = Of(lambda m, x: {"both": Output([Net(name="a")(x)], (Net(name="b")(x),))})

    def loss(model, batch):
        (first,) = model(batch["x"])["both"].first
        return (first - batch["y"]) ** 2

    ddp, _ = judged(branches, loss)
    assert {path.split("/")[0] for path in ddp.plan.unused} == {"b"}
    assert {p.split("/")[0] for b in ddp.plan.buckets for p in b.paths} == {"a"}


def test_inputs_may_be_nested_and_of_different_lengths():
    """NUM-12: sequences with their lengths, in a tuple in a dict."""

    def sequences(m, batch):
        (tokens, lengths), extra = batch["text"], batch["more"]["x"]
        x = nn.RNN(nn.SimpleCell(WIDTH))(nn.Embed(5, WIDTH)(tokens), seq_lengths=lengths)
        x = jnp.take_along_axis(x, lengths[:, None, None] - 1, 1)[:, 0]
        return (x + extra).sum(-1)

    def batch(seed):
        rng, rows = np.random.default_rng(seed), make_rows(seed=seed)
        text = rng.integers(5, size=(16, 6), dtype=np.int32), rng.integers(1, 7, 16, dtype=np.int32)
        return {"text": text, "more": {"x": rows["x"]}, "y": rows["y"]}

    judged(Of(sequences), lambda m, b: (m(b) - b["y"]) ** 2, batches=[batch(0), batch(1)])


def by_rows(model, batch):
    """Each row chooses its branch."""
    return (jnp.where(batch["x"][:, 0] > 0, model.a(batch["x"]), model.b(batch["x"])) - 1) ** 2


def by_shares(model, batch, *, shares=1):
    """The first row of each share chooses for all of its rows."""
    if model.is_initializing():
        return by_rows(model, batch)
    branches = lambda model, x: model.a(x), lambda model, x: model.b(x)
    parts = [nn.cond(x[0, 0] > 0, *branches, model, x) for x in jnp.split(batch["x"], shares)]
    return (jnp.concatenate(parts) - 1) ** 2


def one_sided(users):
    """Rows that make the first `users` of the replicas take branch `a`, and the others `b`."""
    batch = make_rows()
    takes_a = np.arange(judge.ROWS) // (judge.ROWS // judge.REPLICAS) < users
    batch["x"][:, 0] = np.where(takes_a, 1, -1) * np.abs(batch["x"][:, 0])
    return batch


@pytest.mark.parametrize("loss", [by_rows, by_shares])
def test_a_branch_that_some_replicas_take_gets_the_mean_over_all(loss):
    """UNU-1, UNU-2: none, one, all but one and all; nobody has to know what the others use."""
    alone = by_rows if loss is by_rows else functools.partial(by_shares, shares=judge.REPLICAS)
    batches = [one_sided(users) for users in (0, 1, judge.REPLICAS - 1, judge.REPLICAS)]
    ddp, _ = judged(Either(), loss, alone=alone, batches=batches)
    assert ddp.plan.unused == ()


HALVES = {  # the dtype of the parameter and of the wire, the rows, and the micro-batches
    "as many replicas": ("float16", None, [2**15] * 2, 1),
    "many rows": ("float16", None, [2**10] * 512, 1),
    "a wire": ("float32", "float16", [2**12] * 512, 2),
    "bfloat16, which knows nothing between 512 and 516": (
        "bfloat16",
        None,
        [256, 256, 1, 1, 1, 1] * 2,
        3,
    ),
}


@in_both_places
@pytest.mark.parametrize("dtype, wire_dtype, rows, parts", HALVES.values(), ids=HALVES)
def test_a_half_precision_gradient_is_summed_wide_and_finite_where_its_mean_is(
    place, dtype, wire_dtype, rows, parts
):
    """NUM-4: float16 ends at 65504, and neither replicas nor rows may be added up beyond it."""
    batch = {"x": np.array(rows, np.float32)}
    options = joined(place, reduction=jddp.Reduction(wire_dtype=wire_dtype))
    options |= {"mesh": 2, "optimizer": optax.sgd(1.0), "accumulate_steps": parts}
    half = Of(lambda m, x: m.param("w", nn.initializers.zeros, (), dtype) * x)
    ddp = wrapped(half, lambda m, b: m(b["x"].astype(dtype)), **options)
    state, metrics = ddp.step(ddp.init(0, batch), batch)
    assert state.params["w"].dtype == dtype
    assert float(state.params["w"]) == -np.mean(rows)
    assert float(metrics["loss"]) == 0


@in_both_places
def test_what_travels_depends_neither_on_k_nor_on_the_rows(place):
    """ACC-1: not its number, not its bytes; and nothing travels inside of the loop over parts."""

    def collectives(num_parts, rows_of_a_part):
        ddp = wrapped(Net(), accumulate_steps=num_parts, **place)
        found = judge.sent(ddp, make_rows(judge.REPLICAS * num_parts * rows_of_a_part))
        return sorted((x.op, x.dtypes, x.bytes, x.is_in_loop, x.num_runs) for x in found)

    want = collectives(1, 2)
    assert all(op == "all-reduce" and num_runs == 1 for op, *_, num_runs in want)
    assert sum(x[2] for x in want) == 4 * (WIDTH * WIDTH + WIDTH + WIDTH + 1) + 8
    assert collectives(2, 2) == collectives(8, 5) == want


@in_both_places
def test_memory_does_not_grow_with_k(place):
    """What a part may add is its key, and the sum and count of its losses: sixteen bytes."""
    wide = Of(lambda m, x: nn.Dense(1)(nn.tanh(nn.Dense(64)(nn.tanh(nn.Dense(64)(x)))))[:, 0])

    def temporaries(num_parts):
        ddp = wrapped(wide, mesh=2, accumulate_steps=num_parts, **place)
        compiled = ddp.steps.lower(make_rows(2 * 32 * num_parts)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(12) <= temporaries(3) + 9 * 16


def test_replicas_may_use_other_layers_in_each_micro_batch():
    """ACC-4: four replicas, four parts, each with a choice of its own; one row in each."""
    ddp, _ = judge.beside_one_device(Either(), by_shares, alone=by_rows, accumulate_steps=4)
    assert ddp.plan.unused == ()


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
    ddp, state = judge.beside_one_device(SOMETIMES, optimizer=adamw(), rtol=1e-4)
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
    first = judge.host((state.params, state.opt_state))
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
    ddp, _ = judge.beside_one_device(Aliases(nnx.Rngs(0)), places=["flat-ready"])
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
    first = judge.host(state.params["extra"]["kernel"])
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
