"""Cases of PyTorch's DDP, as README.md lists them, and models that transform themselves."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from judge import (
    REPLICAS,
    ROWS,
    WIDTH,
    Either,
    Net,
    beside_one_device,
    in_both_places,
    joined,
    make_rows,
    sent,
    squares,
    wrapped,
)
from tiny import Of

import jddp

KERNEL = nn.initializers.normal()

# The place that takes a transformed backward pass apart; the others run it as it is.
judged = functools.partial(beside_one_device, places=["flat-ready"])


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
    takes_a = np.arange(ROWS) // (ROWS // REPLICAS) < users
    batch["x"][:, 0] = np.where(takes_a, 1, -1) * np.abs(batch["x"][:, 0])
    return batch


@pytest.mark.parametrize("loss", [by_rows, by_shares])
def test_a_branch_that_some_replicas_take_gets_the_mean_over_all(loss):
    """UNU-1, UNU-2: none, one, all but one and all; nobody has to know what the others use."""
    alone = by_rows if loss is by_rows else functools.partial(by_shares, shares=REPLICAS)
    batches = [one_sided(users) for users in (0, 1, REPLICAS - 1, REPLICAS)]
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
        found = sent(ddp, make_rows(REPLICAS * num_parts * rows_of_a_part))
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
    ddp, _ = beside_one_device(Either(), by_shares, alone=by_rows, accumulate_steps=4)
    assert ddp.plan.unused == ()
