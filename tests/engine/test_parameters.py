"""Awkward parameters, and frozen ones: right, or refused with a reason."""

import jax
import jax.numpy as jnp
import judge
import numpy as np
import optax
import pytest
import tiny
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict
from judge import WIDTH, Net, beside_one_device, in_both_places, make_rows, start, wrapped
from sweeps import swept
from tiny import ConvNet, NnxConvNet, Of, loss_fn, make_batch, take_steps

import jddp
from jddp.checkpoint.reader import read_newest
from jddp.ground.errors import ConfigError


def no_units(x):
    """NUM-10: a layer without elements."""
    return nn.Dense(0, kernel_init=nn.initializers.zeros, name="none")(x)


def of_complex(m, x):
    weights = m.param("complex", nn.initializers.normal(1.0), (WIDTH, 3), jnp.complex64)
    y = x.astype(jnp.complex64) @ weights
    return jnp.abs(y).sum(-1) + nn.Dense(1, name="real")(y.imag)[:, 0]


def mixed_dtypes(m, x):
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        x = nn.tanh(nn.Dense(WIDTH, param_dtype=dtype, name=jnp.dtype(dtype).name)(x))
    return x.sum(-1)


def tied_embedding(m, x):
    table = nn.Embed(7, WIDTH)
    tokens = jnp.abs(3 * x).astype(jnp.int32) % 7
    return table.attend(nn.tanh(table(tokens)).mean(1)).sum(-1)


class TiedNnx(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.last = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.last.kernel = self.first.kernel

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x))).sum(-1)


NO_PARAMETERS = Of(lambda m, x: x.sum(-1))


MODELS = {
    "one scalar": lambda: Of(lambda m, x: x.sum(-1) * m.param("w", nn.initializers.ones, ())),
    "a leaf without elements": lambda: Of(lambda m, x: Net()(jnp.append(x, no_units(x), -1))),
    "no leaf with elements": lambda: Of(lambda m, x: x.sum(-1) + no_units(x).sum(-1)),
    "no parameters": lambda: NO_PARAMETERS,
    "complex": lambda: Of(of_complex),
    "tied embedding": lambda: Of(tied_embedding),
    "tied in NNX": lambda: TiedNnx(nnx.Rngs(0)),
}


@pytest.mark.parametrize("name", swept([*MODELS], every=3))
def test_n_devices_equal_one_device(name):
    beside_one_device(MODELS[name]())


@pytest.mark.parametrize("accumulate_steps, place", [(1, "leaf-end"), (2, "flat-ready")])
def test_dtypes_may_be_mixed_and_stay_as_they_are(accumulate_steps, place):
    options = {"accumulate_steps": accumulate_steps, "places": [place]}
    # A replica rounds its share's gradient to eight bits, one device that of the whole batch: 2^-6.
    ddp, state = beside_one_device(Of(mixed_dtypes), rtol=2**-6, **options)
    for name, layer in state.params.items():
        assert {x.dtype.name for x in jax.tree.leaves(layer)} == {name}
    assert {bucket.dtype.name for bucket in ddp.plan.buckets} == set(state.params)


@in_both_places
def test_the_imaginary_part_of_a_complex_gradient_arrives(place):
    """NUM-6, in closed form: |w x|^2 has the gradient 2 conj(w) x^2, conjugate as JAX has it."""

    square = Of(lambda m, x: jnp.abs(m.param("w", lambda _: jnp.complex64(1 + 2j)) * x) ** 2)
    batch = {"x": np.arange(1, 9, dtype=np.float32)}
    ddp = wrapped(square, lambda m, b: m(b["x"]), optimizer=optax.trace(0.0), **place)
    state, _ = ddp.step(ddp.init(0, batch), batch)
    gradient = 2 * (1 - 2j) * np.mean(batch["x"] ** 2)
    np.testing.assert_allclose(state.opt_state.trace["w"], gradient, rtol=1e-6)


def test_complex_and_real_parameters_travel_in_buckets_of_their_own():
    """NUM-6: one cap that would hold all."""
    ddp = wrapped(Of(of_complex), reduction=jddp.Reduction(bucket_mb=25))
    ddp.init(0, make_rows())
    assert {b.dtype.name: b.bytes for b in ddp.plan.buckets} == {"complex64": 96, "float32": 16}


@in_both_places
def test_a_model_without_parameters_sends_the_loss_and_nothing_else(place):
    ddp = wrapped(NO_PARAMETERS, max_grad_norm=1.0, ema_decay=0.9, **place)
    state, metrics = ddp.step(start(ddp, make_rows()), make_rows())
    assert (len(ddp.plan), float(metrics["grad_norm"]), int(state.step)) == (0, 0.0, 1)
    assert [x.num_elements for x in judge.sent(ddp)] == [2]


def test_parameters_that_are_no_floats_are_refused_by_name():
    """BKT-5: JAX gives them gradients of float0, which nobody can average."""
    for dtype in ("int32", "uint8", "bool"):

        def body(m, x, dtype=dtype):
            return Net()(x) + m.param("layer", lambda _: {"n": jnp.ones(3, dtype)})["n"].sum()

        with pytest.raises(ConfigError, match=f"'layer/n' is an array of {dtype}.*out of the par"):
            wrapped(Of(body)).init(0, make_rows())
    with pytest.raises(ConfigError, match="'n' is an array of int32"):  # before a batch is seen
        wrapped(nnx.Dict(n=nnx.Param(jnp.arange(3)))).init(0)


@pytest.mark.parametrize("model", [Net(), Of(of_complex)], ids=["real", "complex"])
def test_the_norm_is_that_of_the_whole_mean_gradient(model):
    """Not a replica's, a bucket's or a part's, before the mean or after it."""
    ddp, state = beside_one_device(model, max_grad_norm=0.1, accumulate_steps=2)
    assert ddp.step(state, make_rows())[1]["grad_norm"] > 0.1


def test_frozen_parameters_are_neither_sent_nor_in_the_optimizer_state():
    ddp, full = (wrapped(Net(), frozen=patterns) for patterns in (["first/.*"], []))
    shapes, whole = (x.steps.abstract_state(make_rows()) for x in (ddp, full))
    num_frozen = sum(x.size for x in jax.tree.leaves(whole.params["first"]))
    plans = [x.steps.planned(make_rows()).plan for x in (full, ddp)]
    assert plans[0].wire_bytes - plans[1].wire_bytes == 4 * num_frozen
    momentum = [sum(x.size for x in jax.tree.leaves(s.opt_state)) for s in (whole, shapes)]
    assert momentum[0] - momentum[1] == num_frozen
    assert "2 frozen leaves, 7.63e-05 MiB: neither trained nor sent" in str(plans[1])


@pytest.mark.parametrize(
    "model", swept([ConvNet(), NnxConvNet(nnx.Rngs(0))], every=2), ids=["linen", "nnx"]
)
@pytest.mark.parametrize("batch_norm", swept(["sync", "local"], every=2))
def test_a_run_with_frozen_parameters_is_read_as_that_of_a_whole_model(tmp_path, model, batch_norm):
    """Kept, opened, evaluated by its moving average, and continued with all parameters."""
    batch, frozen = make_batch(), {"frozen": lambda path: "kernel" in path, "ema_decay": 0.5}
    ddp = tiny.wrapped(model, optax.adam(0.1), batch_norm=batch_norm, **frozen)
    options = {"evaluate": jddp.Evaluation([batch], "ema"), "run_dir": tmp_path}
    run = jddp.fit(ddp, [batch] * 2, num_steps=2, **options)
    opened = jddp.open_run(tmp_path, model=model, loss_fn=loss_fn, mesh=2)
    assert opened.evaluate([batch]) == run.evaluate([batch])
    saved = read_newest(tmp_path / "checkpoints", ["params", "model_state"])
    assert "params" not in saved["model_state"]
    released = tiny.wrapped(model, batch_norm=batch_norm)
    state = released.init(0, batch, params=tmp_path)
    assert released.evaluate(state, [batch]) == ddp.evaluate(run.state, [batch])
    before = flatten_dict(jax.device_get(state.params))  # the step takes the state
    after = flatten_dict(take_steps(released, [batch], state)[0].params)
    assert not any(np.array_equal(x, after[path]) for path, x in before.items() if x.ndim > 1)


BAD = {
    "misspelt": (["frist/.*"], r"'frist/\.\*' matches no .*nearest are 'first/bias', 'first/k"),
    "a part of a path": (["first"], "'first' matches no whole path"),
    "no expression": (["(first"], "no regular expression: missing"),
    "all": (".*", "it matches all parameters"),
    "none": (lambda path: False, "it matches none"),
}


@pytest.mark.parametrize("frozen, message", BAD.values(), ids=BAD)
def test_patterns_that_match_nothing_or_everything_are_refused(frozen, message):
    with pytest.raises(jddp.ConfigError, match=message):
        wrapped(Net(), frozen=frozen).init(0, make_rows())


@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_a_norm_whose_square_float16_cannot_hold_is_clipped_all_the_same(shard_optimizer):
    def steep(m, x):
        w = m.param("w", nn.initializers.zeros, (4,), jnp.float16)
        return w.astype(jnp.float32).sum() * x[:, 0]

    batch, options = {"x": np.full((judge.ROWS, 1), 300, np.float32)}, {"max_grad_norm": 1.0}
    options |= {"optimizer": optax.sgd(1.0), "strategy": "zero1" if shard_optimizer else "ddp"}
    ddp = wrapped(Of(steep), lambda m, b: m(b["x"]), **options)
    state, metrics = ddp.step(ddp.init(0, batch), batch)
    assert (metrics["grad_norm"], metrics["grad_norm"].dtype) == (600, jnp.float32)
    np.testing.assert_array_equal(state.params["w"], np.full(4, -0.5, np.float16))
