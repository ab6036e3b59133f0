"""`compute_dtype`: a model computes in a narrower dtype than that of its parameters."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from states import equal
from sweeps import swept
from tiny import MODELS, Of, loss_fn, make_batch, take_steps, wrapped

import jddp
from jddp.trainer.job.build import train

BATCHES = [make_batch(), make_batch(seed=1)]


def narrow(tree):
    return jax.tree.map(lambda x: x.astype("bfloat16"), tree)


TIMES = np.linspace(990, 999.9, 16).astype(np.float32)  # three different ones in bfloat16


def sines(t):
    return jnp.sin(t[:, None] * jnp.exp(-jnp.arange(8) / 2)[None])


def multiples(t):
    return jnp.stack([jnp.sin(t * 2.0**-k) for k in range(8)], axis=-1)


def weight(module, *shape):
    return module.param("w", nn.initializers.normal(), shape)


def layers(module, t, x):
    seen = sines(t)
    h = nn.Conv(8, (3,))(x) + nn.Dense(8)(seen)[:, None]
    return seen, nn.Dense(3)(nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(h)).mean(1))


class Rates(nnx.Module):
    def __init__(self):
        self.rates = nnx.Param(jnp.linspace(0.1, 1, 8)[None])
        self.first = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
        self.other = nnx.Conv(4, 3, (3,), rngs=nnx.Rngs(1))

    def __call__(self, t, x):
        seen = jnp.sin(t[:, None] * self.rates[...])
        return seen, self.first(seen) + self.other(x).mean(1)


SEEING = {
    "own": lambda: Of(
        lambda m, t, x: (sines(t), sines(t) * weight(m, 1, 8) + nn.Dense(8)(x).mean(1))
    ),
    "layers": lambda: Of(layers),
    "nnx": Rates,
}


def squares(model, batch):
    return model(batch["t"], batch["x"])[1].sum(-1) ** 2


def run_seeing(ddp):
    """The program of a step, and the values that a model's arithmetic makes of times."""
    batch = {"t": TIMES, "x": np.ones((16, 6, 4), np.float32)}
    state = ddp.init(0, batch)
    seen = ddp.predict(state, [batch], lambda model, batch: model(batch["t"], batch["x"])[0])
    return ddp.steps.lower(batch).as_text(), seen


@pytest.mark.parametrize("make", swept(SEEING, every=4))
@pytest.mark.parametrize("precision", swept(["bfloat16", "float16"], every=2))
def test_inputs_are_float32_until_a_product_and_all_products_are_narrow(make, precision):
    """As under `torch.autocast`. Sixteen times of a diffusion model became three."""
    ddp = wrapped(make(), loss=squares, precision=precision)
    with jax.numpy_dtype_promotion("standard"):  # Strict, no float32 meets a narrow parameter.
        text, seen = run_seeing(ddp)
    assert len(np.unique(seen, axis=0)) == len(TIMES)
    products = r"stablehlo\.(?:dot_general|convolution)[^\n]*: \(tensor<([^>]*)>, tensor<([^>]*)>\)"
    found = re.findall(products, text)
    kinds = {shape.split("x")[-1] for pair in found for shape in pair}
    assert kinds == {{"bfloat16": "bf16", "float16": "f16"}[precision]}


class Cell(nn.Module):
    @nn.compact
    def __call__(self, h, x):
        h = nn.tanh(nn.Dense(8)(x) + nn.Dense(8)(h))
        return h, h


def float32_carry(module, t, x):
    layers = nn.scan(Cell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1)
    return multiples(t), layers()(jnp.zeros((len(x), 8)), x)[0]


WIDE = {
    "a product": lambda m, t, x: (multiples(t), multiples(t) @ weight(m, 8, 3)),
    "a carry": float32_carry,
}


@pytest.mark.parametrize("body", swept(WIDE, every=2))
def test_inputs_are_cast_before_a_model_that_could_not_be_traced_or_would_be_wide_without(body):
    text, seen = run_seeing(wrapped(Of(body), loss=squares, precision="bfloat16"))
    assert len(np.unique(seen, axis=0)) == 3
    assert "bf16" in text


def cast_by_hand(model, batch, train):
    if model.is_initializing():
        return loss_fn(model, batch, train)
    module, variables = model.unbind()

    def logits(x, train):
        return module.apply(narrow(variables), narrow(x), train=train).astype("float32")

    return loss_fn(logits, batch, train)


@pytest.mark.parametrize("name", swept(["mlp", "recurrent", "transformer"], every=3))
def test_it_is_bitwise_the_model_cast_by_hand(name):
    results = []
    for dtype, loss, precision in ((jnp.bfloat16, cast_by_hand, None), (None, loss_fn, "bfloat16")):
        ddp = wrapped(MODELS[name](dtype=dtype), loss=loss, precision=precision)
        state, _ = take_steps(ddp, BATCHES)
        assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}
        results.append((state.params, ddp.evaluate(state, BATCHES)))
    equal(*results)


@pytest.mark.parametrize("batch_norm", ["sync", "local"])
@pytest.mark.parametrize("name", swept(["conv", "nnx"], every=2))
def test_statistics_are_those_of_layers_that_have_the_dtype_themselves(name, batch_norm):
    """Bitwise, until scales that layers of a dtype leave wide differ from 1."""
    results = []
    for dtype, precision in ((jnp.bfloat16, None), (None, "bfloat16")):
        ddp = wrapped(MODELS[name](dtype=dtype), batch_norm=batch_norm, precision=precision)
        evaluated = ddp.evaluate(ddp.init(0, BATCHES[0]), BATCHES)
        state, metrics = take_steps(ddp, BATCHES[:1])
        assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}
        results.append((evaluated, metrics, {**state.model_state, "rngs": None}))
    equal(*results)


class TwoMethods(nnx.Module):
    """A loss may call both; the second calls the first."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones((16, 3)))
        self.table = nnx.Embed(4, 3, rngs=nnx.Rngs(0))

    def encode(self, x):
        assert (x.dtype, self.w.dtype) == (jnp.bfloat16, jnp.bfloat16)
        return x @ self.w[...]

    def __call__(self, x, y):
        encoded = self.encode(x) + self.table(y)
        assert (encoded.dtype, y.dtype) == (jnp.bfloat16, jnp.int32)
        return encoded.sum(-1)


def test_layers_without_a_dtype_get_narrow_arrays_and_the_loss_wide_ones():
    def loss(model, batch, train):
        outputs = [model(batch["x"], batch["y"]), model.encode(batch["x"]).sum(-1)]
        assert {x.dtype.name for x in [*outputs, batch["x"]]} == {"float32"}
        return sum(outputs)

    ddp = wrapped(TwoMethods(), loss=loss, precision="bfloat16")
    state, _ = take_steps(ddp, BATCHES[:1])
    assert ddp.evaluate(state, BATCHES)["examples"] == 32


class Words(nnx.Module):
    def __init__(self):
        self.table = nnx.Embed(5, 3, rngs=nnx.Rngs(0))

    def __call__(self, y):
        return look_up(self.table, y)


def look_up(table, y):
    rows = table(y)
    scores = table.attend(rows)
    assert rows.dtype == scores.dtype
    return scores.sum(-1) + rows.sum(-1)


def words(module, y):
    return look_up(nn.Embed(5, 3), y)


@pytest.mark.parametrize(
    "make", [Words, lambda: Of(words), lambda: nnx.Embed(5, 3, rngs=nnx.Rngs(0))]
)
@pytest.mark.parametrize("compute_dtype", swept(["bfloat16", None], every=2))
def test_the_gradient_of_an_embedding_is_added_up_in_float32(make, compute_dtype):
    def loss(model, batch):
        outputs = model(batch["y"])
        assert outputs.dtype == "float32"
        return outputs.reshape(len(outputs), -1).sum(-1)

    ddp = wrapped(make(), loss=loss, precision=jddp.Precision(compute_dtype=compute_dtype))
    text = ddp.steps.lower(BATCHES[0]).as_text()
    assert re.findall(r'"stablehlo.scatter".*?\}\) : \(tensor<([^>]*)>', text, re.S) == ["5x3xf32"]
    assert ("bf16" in text) == (compute_dtype is not None)
    state, _ = take_steps(ddp, BATCHES)
    assert ddp.evaluate(state, BATCHES)["examples"] == 32


def test_other_widths_are_refused():
    def init(model, dtype):
        precision = jddp.Precision(compute_dtype=dtype)
        wrapped(model, loss=lambda m, b: m(b["x"]), precision=precision).init(0, BATCHES[0])

    wide = nnx.Linear(16, 1, dtype="float32", rngs=nnx.Rngs(0))
    for model, dtype, message in (
        (nn.Dense(1, dtype=jnp.float32), "float16", "its own dtype"),
        (wide, "float16", "its own dtype"),
        (nn.Dense(1), jnp.float32, "compute_dtype must be"),
    ):
        with pytest.raises(jddp.ConfigError, match=message):
            init(model, dtype)


@pytest.mark.slow
def test_a_job_is_evaluated_in_its_compute_dtype_when_it_is_opened_again(tmp_path):
    config = jddp.Config(
        run={"dir": str(tmp_path)},
        train={"num_steps": 2},
        data={"global_batch_size": 64},
        model={"name": "mlp", "kwargs": {"widths": [8]}},
        mesh={"num_devices": 2},
        ddp={"precision": "bfloat16", "frozen": ["Dense_0/.*"]},
    )
    run = train(config)
    assert jddp.open_run(tmp_path, mesh=2).evaluate() == run.evaluate()
    assert list(run.state.params) == ["Dense_1"]
