"""Reductions where gradients are ready: the same numbers, in the order of the backward pass."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import linen as nn
from tiny import MODELS, Of, make_batch

import jddp
from jddp.reduce.backward import trace_backward

BYTES = 1 / 2**20


def wrapped(model=None, *, bucket=200, layout="flat", overlap=True, **options):
    sizes = [x * BYTES for x in np.atleast_1d(bucket)]
    reduction = jddp.Reduction(bucket_mb=sizes, layout=layout, overlap=overlap)
    return tiny.wrapped(model, reduction=reduction, **{"mesh": None, **options})


def params():
    return {"first": jnp.ones((3, 3)), "last": jnp.ones((3, 2)), "unused": jnp.ones(2)}


def traced(loss, *args):
    def backward(params, *args):
        _, pullback = jax.vjp(lambda params: loss(params, *args), params)
        found.append(trace_backward(lambda one: pullback(one)[0]))

    found = []
    jax.eval_shape(backward, *args)
    return found[0]


def test_gradients_are_ready_with_their_last_summand_in_calls_too_and_unused_ones_never():
    """The tree is in the alphabet's order, which is not the network's."""

    def tied(params, x):
        return (jnp.tanh(x @ params["first"]) @ params["first"].T @ params["last"]).sum()

    def two_layers(params, x):
        return (jnp.tanh(x @ params["first"]) @ params["last"]).sum()

    # Of one call, which is not opened, all gradients would be ready only at its end.
    for run in (two_layers, jax.jit(lambda *given: jax.jit(two_layers)(*given))):
        backward = traced(run, params(), jnp.ones((5, 3)))
        once, last, unused = backward.ready
        assert last < once
        assert unused is None
        assert "jit" not in {eqn.primitive.name for eqn in backward.traced.eqns}
    first, last, _ = traced(tied, params(), jnp.ones((5, 3))).ready
    assert last < first
    assert first > once
    # The cotangent itself is ready at once.
    assert traced(lambda params: params["w"], {"w": jnp.float32(3)}).ready == (0,)


def test_the_plan_follows_the_network_and_not_the_alphabet():
    def net(m, x, train):
        x = nn.tanh(nn.Dense(16, name="b_first")(x))
        x = nn.tanh(nn.Dense(16, name="c_second")(x))
        return nn.Dense(4, name="a_last")(x)

    ddp = wrapped(Of(net), bucket=[300, 1100], layout="auto", overlap="auto")
    plan = ddp.steps.planned(make_batch()).plan
    layers = [{path.partition("/")[0] for path in bucket.paths} for bucket in plan.buckets]
    assert layers == [{"a_last"}, {"c_second"}, {"b_first"}]
    assert "as the backward pass finishes them" in str(plan)


def test_the_order_of_an_nnx_model_is_a_guess_until_a_batch_was_seen():
    ddp = wrapped(MODELS["nnx"](), overlap="auto")
    state = ddp.init()
    assert "by guess" in str(ddp.plan)
    ddp.step(state, make_batch())
    assert "as the backward pass finishes them" in str(ddp.plan)


def operations(ddp, batch):
    """The chain of the lowered step: a barrier before each reduction, products in between."""
    letters = {"optimization_barrier": "b", "all_reduce": "r", "dot_general": "."}
    found = re.findall(rf"stablehlo\.({'|'.join(letters)})", ddp.steps.lower(batch).as_text())
    return "".join(letters[name] for name in found)


def test_a_bucket_leaves_where_its_last_gradient_is_made():
    ready, end = (wrapped(overlap=overlap) for overlap in (True, False))
    # Two products forward. Then, backward: the last bias; the last kernel; what goes on to the
    # first layer, and its bias; its kernel. The one vector of loss and metrics is reduced last.
    assert operations(ready, make_batch()) == "..br.br.br.brr"
    assert operations(end, make_batch()) == ".....rrrrr"
    plans = [str(ddp.steps.planned(make_batch()).plan) for ddp in (ready, end)]
    assert "overlap on: buckets leave inside the backward pass" in plans[0]
    assert "overlap off: buckets leave after the backward pass" in plans[1]
    # A barrier holds the bucket, what the rest of the pass needs, and the bucket before; there is
    # none before the first bucket, and nothing goes on after the last.
    text = ready.steps.lower(make_batch()).as_text()
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    held = [len(re.findall(r"%[\w#]+", line.split("=")[1])) for line in barriers]
    assert held == [1 + 1, 1 + 1 + 1, 1 + 1 + 1, 1 + 1]
    with pytest.raises(jddp.ConfigError, match="overlap must be .* or 'auto', not 'ready'"):
        wrapped(overlap="ready", strategy=jddp.LocalSteps(2))


def test_on_gpus_nothing_is_packed_for_a_single_one(monkeypatch):
    monkeypatch.setattr("jddp.reduce.reducer.GPUS", ("cpu",))
    steps = [wrapped(mesh=num, overlap="auto").steps for num in (1, 2)]
    assert [x.spec.backward.overlaps for x in steps] == [False, True]
