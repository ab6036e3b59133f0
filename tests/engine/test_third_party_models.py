"""Models that were not written for jddp are taken as they are, or refused in a sentence."""

import collections
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import linen as nn
from flax import nnx
from judge import WIDTH, host, make_rows
from states import equal
from sweeps import swept
from tiny import MLP, NUM_CLASSES, Of, loss_fn, make_batch, take_steps

import jddp
from jddp.ground.errors import ConfigError

wrapped = functools.partial(tiny.wrapped, mesh=None)


def passes(model):
    report = jddp.verify(model, optax.sgd(0.1), loss_fn, make_batch())
    assert report.passed, report


def shared(m, x, train):
    norm = nn.BatchNorm(use_running_average=not train)
    x = nn.relu(norm(nn.Dense(8)(x)))
    return nn.Dense(NUM_CLASSES)(norm(nn.Dense(8)(x)))


class NnxBranch(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.norm = nnx.Linear(16, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.dense(x)))


class NnxVmapped(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: NnxBranch(rngs), in_axes=0, out_axes=0)
        self.branches = make(rngs.split(4))
        self.last = nnx.Linear(8, NUM_CLASSES, rngs=rngs)

    def __call__(self, x, train):
        run = nnx.vmap(lambda branch, x: branch(x), in_axes=(0, None), out_axes=0)
        return self.last(run(self.branches, x).mean(0))


def scanned(m, x, train):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.relu(nn.BatchNorm(not train)(nn.Dense(16)(x))), None

    axes = {"variable_axes": {"params": 0, "batch_stats": 0}, "split_rngs": {"params": True}}
    return nn.Dense(4)(nn.scan(nn.remat(Layer), length=2, **axes)()(x, None)[0])


NORMED = {"vmapped": NnxVmapped(nnx.Rngs(0)), "shared": Of(shared), "scanned": Of(scanned)}


@pytest.mark.parametrize("model", swept(NORMED, every=2))
def test_a_batch_norm_that_is_shared_vmapped_or_scanned_is_synchronised(model, caplog):
    passes(model)
    assert "cannot synchronise" not in caplog.text


class NnxPartitioned(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", "model"))
        self.first = nnx.Linear(16, 8, kernel_init=init, rngs=rngs)
        self.last = nnx.Linear(8, NUM_CLASSES, rngs=rngs)

    def __call__(self, x, train):
        return self.last(nnx.relu(self.first(x)))


def layers_of_meshes(m, x, train, named=True):
    """Layers that unbox their kernels in each call, logical names with rules, and constraints."""
    lecun = nn.initializers.lecun_normal()
    box = nn.with_partitioning if named else lambda init, names: init
    logical = nn.with_logical_partitioning if named else lambda init, names: init
    x = nn.DenseGeneral(8, kernel_init=box(lecun, ("fsdp", "model")))(x)[:, None]
    if named:
        x = jax.lax.with_sharding_constraint(x, jax.P("batch", None, "model"))
        x = nn.with_logical_constraint(x, ("rows", None, "embed"))
    attention = nn.MultiHeadDotProductAttention(
        num_heads=2,
        kernel_init=box(lecun, ("fsdp", None, "model")),
        out_kernel_init=logical(lecun, ("heads", None, "embed")),
    )
    return nn.DenseGeneral(NUM_CLASSES, kernel_init=logical(lecun, ("embed", None)))(
        attention(x, x)[:, 0]
    )


def test_a_model_written_to_be_sharded_trains_and_evaluates_as_one_that_is_not(caplog):
    batch, ends = make_batch(), []
    rules = [("rows", "fsdp"), ("embed", "model"), ("heads", None)]
    for options in ({}, {"named": False}):
        with nn.logical_axis_rules(rules), caplog.at_level(logging.WARNING, "jddp"):
            ddp = wrapped(Of(functools.partial(layers_of_meshes, **options)))
            state, metrics = take_steps(ddp, [batch] * 2)
            evaluated = ddp.evaluate(state, [batch])
            outputs = ddp.predict(state, [batch], lambda m, rows: m(rows["x"], train=False))
        ends.append((state.params, metrics, evaluated, outputs))
    equal(*ends)
    axes = " ".join(record.getMessage() for record in caplog.records)
    assert all(axis in axes for axis in ("fsdp", "model", "batch"))
    with nn.logical_axis_rules(rules):
        passes(Of(layers_of_meshes))
    # Constraints outside of a step are as they were.
    rows = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(rows, jax.P("rows"))
    x = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, sharding))(np.zeros(16))
    assert x.sharding == sharding


def test_a_module_that_lies_on_another_mesh_is_taken_whole(caplog):
    types = (jax.sharding.AxisType.Auto,) * 2
    with jax.set_mesh(jax.make_mesh((2, 4), ("fsdp", "model"), axis_types=types)):
        module = NnxPartitioned(nnx.Rngs(0))
    assert not module.first.kernel[...].sharding.is_fully_replicated
    with caplog.at_level(logging.WARNING, "jddp"):
        ddp = wrapped(module)
    assert "mesh axes fsdp, model" in caplog.text
    state = ddp.init(0)
    np.testing.assert_array_equal(state.params["first"]["kernel"], module.first.kernel[...])
    _, metrics = ddp.step(state, make_batch())
    assert np.isfinite(metrics["loss"])


Statistic = type("Statistic", (nnx.Variable,), {})


class OwnVariables(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(16, NUM_CLASSES, rngs=rngs)
        self.lora = nnx.LoRA(16, 2, NUM_CLASSES, rngs=rngs)
        self.seen = Statistic(jnp.zeros((), jnp.int32))

    def __call__(self, x, train):
        if train:
            self.seen[...] += 1
        return self.dense(x) + self.lora(x)


def test_variables_of_one_s_own_are_trained_or_kept():
    ddp = wrapped(OwnVariables(nnx.Rngs(0)))
    state = ddp.init(0)
    before = host(state.params["lora"]["lora_b"])
    state, _ = take_steps(ddp, [make_batch()] * 2, state)
    assert not np.array_equal(before, state.params["lora"]["lora_b"])
    assert int(state.model_state["rest"]["seen"]) == 2
    passes(OwnVariables(nnx.Rngs(0)))


def squares(model, batch, train):
    return (model(batch["x"], train) - batch["y"]) ** 2


@pytest.mark.parametrize("collection", ["losses", "intermediates"])
def test_a_loss_reads_what_its_model_has_sown(collection):
    def sowing(m, x, train):
        hidden = nn.Dense(WIDTH)(x)
        m.sow(collection, "square", (hidden**2).mean(-1))
        return nn.Dense(1)(nn.tanh(hidden))[:, 0]

    def loss_fn(model, batch, train):
        losses = squares(model, batch, train)
        if not train:
            return losses
        (sown,) = model.variables[collection]["square"]
        return losses + 0.1 * sown

    ddp = wrapped(Of(sowing), loss=loss_fn)
    state, _ = take_steps(ddp, [make_rows()])
    assert state.model_state == {}
    variables = ddp.model(state)
    state, second = ddp.step(state, make_rows())

    def plain(params):
        run = nn.apply(lambda m: loss_fn(m, make_rows(), True), Of(sowing), mutable=True)
        return run({"params": params})[0].mean()

    np.testing.assert_allclose(second["loss"], plain(variables["params"]), rtol=1e-5)
    assert ddp.evaluate(state, [make_rows(5)])["examples"] == 5


def test_what_is_no_flax_module_is_told_what_would_be():
    for model, message in (
        (lambda params, x: x, "model is function"),
        (collections.namedtuple("Transformed", "init apply")(len, len), "model is Transformed"),
        (MLP, "model is the class MLP"),
        ({"params": {}}, "model is dict"),
    ):
        with pytest.raises(ConfigError, match=f"{message}.*wrap a function"):
            wrapped(model)


TO_RETURN = r"returned .'array', 'array'.*\(losses, metrics\) with a"


def test_a_loss_that_returns_something_else_is_told_what_to_return():
    for give, message in (
        (lambda losses: None, "returned NoneType"),
        (lambda losses: [losses], "returned list"),
        (lambda losses: (losses, losses), TO_RETURN),
        (lambda losses: losses[1:], r"'loss' of shape \(1,\) for 2 rows"),
        (lambda losses: (losses, {"top": None}), "metric 'top' of NoneType"),
        (lambda losses: losses > 1, "whole numbers, which have no gradient"),
        (lambda losses: jddp.Mean(losses.astype(int), losses), "returned whole numbers"),
        (lambda losses: jddp.Mean(losses, jnp.ones(3)), r"'loss' of shape \(3,\) for 2 rows"),
        (lambda losses: losses * (1 + 1j), "'loss' of complex64; losses and metrics are real"),
        (lambda losses: (losses, {"wave": losses * 1j}), "'wave' of complex64.*x.real"),
        (lambda losses: jax.lax.stop_gradient(losses).mean(), "does not depend on them"),
        (lambda losses: 0.5, "No gradient reaches any parameter.*Return the loss as JAX computes"),
    ):
        ddp = wrapped(loss=lambda *given, give=give: give(loss_fn(*given)[0]))
        for call in (ddp.steps.trace, functools.partial(ddp.init, 0)):
            with pytest.raises(ConfigError, match=message):
                call(make_batch())


def test_metrics_that_come_and_go_are_named():
    def loss(model, batch, train):
        losses, metrics = loss_fn(model, batch, train)
        return losses, {"zeros": 0 * losses, **metrics} if "more" in batch else {}

    ddp = wrapped(loss=loss)
    state, batches = ddp.init(0, make_batch()), [make_batch(), make_batch() | {"more": np.ones(16)}]
    with pytest.raises(ConfigError, match="'accuracy' is returned for some batches"):
        ddp.evaluate(state, batches)


class Growing(OwnVariables):
    def __call__(self, x, train):
        if not hasattr(self, "scale"):
            self.scale = nnx.Param(jnp.ones(NUM_CLASSES))
        return self.dense(x) * self.scale[None]


def test_a_module_that_gets_parameters_in_the_loss_is_refused():
    ddp = wrapped(Growing(nnx.Rngs(0)))
    with pytest.raises(ConfigError, match="made or removed while it runs"):
        ddp.step(ddp.init(0), make_batch())


def test_a_model_may_keep_a_cache_while_it_is_evaluated():
    def decoder(m, x, train):
        if not train:
            seen = m.variable("cache", "seen", jnp.zeros, (len(x), WIDTH))
            for _ in range(2):
                seen.value = seen.value + x
            x = seen.value
        return nn.Dense(1)(x)[:, 0]

    ddp = wrapped(Of(decoder), loss=squares)
    assert ddp.evaluate(ddp.init(0, make_rows()), [make_rows(), make_rows(5)])["examples"] == 21


def test_a_model_that_trains_where_it_has_keys_for_dropout_is_evaluated_without():
    def body(m, x, train):
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not m.has_rng("dropout"))(x))[:, 0]

    ddp, batch = wrapped(Of(body), loss=squares), make_rows()
    state = ddp.init(0, batch)
    want = squares(Of(body).bind(ddp.model(state)), batch, False).mean()
    np.testing.assert_allclose(ddp.evaluate(state, [batch])["loss"], want, rtol=1e-5)


class Doubled(nn.Module):
    def __call__(self, x):
        return 2 * x


DOUBLED = Doubled()  # bound to no model: Flax lets it be called all the same


def test_a_module_without_parameters_may_be_called_unbound():
    passes(Of(lambda m, x, train=True: nn.Dense(NUM_CLASSES)(DOUBLED(x))))
