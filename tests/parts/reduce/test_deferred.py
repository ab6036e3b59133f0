"""A pass with deferred weight gradients: the same numbers, and products beside its collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from two_replicas import on_two

from jddp.jaxprs import COLLECTIVES, PRODUCTS
from jddp.reduce.backward import defer_weight_gradients, trace_backward
from jddp.reduce.gradients import Running

LAYERS = {name: np.float32([[1, 2], [3, 4]]) + i for i, name in enumerate("abcd")}
ROWS = np.float32([[[1, 2], [3, 5]], [[2, 1], [0, 4]]])  # of two replicas


def loss(params, x, synced, uses):
    """Layers in the order of `uses`; behind some of them the mean of all rows is taken away."""
    for name in uses:
        x = x @ params[name]
        if name in synced:
            x = x - lax.pmean(x.mean(0, keepdims=True), "data")
        x = jnp.maximum(x, 0)
    return x.sum()


def passes(synced, uses="abcd"):
    """The traced pass of each replica, as it is and deferred; and the gradients of both."""
    found = []

    def replica(x):
        _, pullback = jax.vjp(lambda params: loss(params, x, synced, uses), LAYERS)
        backward = trace_backward(lambda one: pullback(one)[0])
        found[:] = backward, defer_weight_gradients(backward)
        return [Running(each, lambda i, x: x).tree() for each in found]

    grads = on_two(replica, ROWS)
    return found, grads


def order(backward):
    """Products, collectives (r) and barriers (b) of a pass."""
    letters = dict.fromkeys(PRODUCTS, ".") | dict.fromkeys(COLLECTIVES, "r")
    letters["optimization_barrier"] = "b"
    return "".join(letters.get(eqn.primitive.name, "") for eqn in backward.traced.jaxpr.eqns)


@pytest.mark.parametrize(
    "synced, uses",
    [("abcd", "abcd"), ("bc", "abcd"), ("a", "abcd"), ("ad", "abcadb"), ("c", "abcd" * 2)],
)
def test_the_gradients_are_those_of_the_pass_as_it_was_traced(synced, uses):
    _, (plain, deferred) = passes(synced, uses)
    for name in LAYERS:
        assert plain[name].any()
        np.testing.assert_array_equal(plain[name], deferred[name])


def test_an_input_gradient_waits_for_the_weight_gradient_of_the_layer_behind():
    (plain, deferred), _ = passes("abcd")
    # Of each layer, last to first: what is reduced, its input gradient, its weight gradient.
    assert order(plain) == "r..r..r..r."
    # The weight gradient of a layer follows what is reduced in the next; then a barrier, and the
    # input gradient of that. After the last input gradient nothing is left to wait.
    assert order(deferred) == "r.r.b.r.b..r."


def test_a_barrier_holds_a_weight_and_a_gradient_and_nothing_of_the_size_of_the_rows():
    """Or XLA would fuse other operations than without it."""
    (_, deferred), _ = passes("abcd")
    barriers = [x for x in deferred.traced.jaxpr.eqns if x.primitive.name == "optimization_barrier"]
    consts = deferred.traced.jaxpr.constvars
    for barrier in barriers:
        weight, gradient = barrier.invars
        assert weight in consts
        assert gradient not in consts
    # The gradient that is returned is the one that was held, or XLA would drop it from the barrier.
    held = {v for barrier in barriers for v in barrier.outvars}
    assert all(any(v in held for v in eqn.invars) for eqn in made_of(deferred, "cd"))


def made_of(backward, names):
    """The equations that return the gradients of these layers."""
    jaxpr = backward.traced.jaxpr
    results = [jaxpr.outvars[[*LAYERS].index(name)] for name in names]
    return [eqn for eqn in jaxpr.eqns if not {*results}.isdisjoint(eqn.outvars)]


def test_gradients_are_ready_in_the_same_order_and_no_bucket_waits_for_more_than_one():
    (plain, deferred), _ = passes("abcd")
    assert [*np.argsort(deferred.ready)] == [*np.argsort(plain.ready)] == [3, 2, 1, 0]
    # With nothing to hide for most of the pass, nothing is deferred.
    (plain, deferred), _ = passes("a")
    assert order(deferred) == order(plain) == "......r."


def test_a_pass_without_a_collective_is_left_alone():
    (plain, deferred), _ = passes("")
    assert deferred is plain
