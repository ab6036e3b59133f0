"""`strategy="fsdp"` on small programs: each kind of primitive, by itself and inside of others."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

from jddp.engine.mesh import over_replicas
from jddp.engine.strategy import FSDP
from jddp.reduce.hooks import choose_packing
from jddp.reduce.reducer import Reducer

NUM, SIZE = 2, 4


def stopped(f):
    """A function that JAX does not differentiate, beside one that it does."""
    return lambda a, b: f(lax.stop_gradient(a), lax.stop_gradient(b)) * a * b


def on_the_host(a, b):
    like = jax.ShapeDtypeStruct(a.shape, a.dtype)
    return jax.pure_callback(np.add, like, a, b, vmap_method="sequential")


def with_a_ref(a, b):
    ref = jax.new_ref(a)
    ref[0] = b[0] * a[1]
    ref[1] += b[1]
    return jax.freeze(ref)


def until_small(a, b):
    def body(state):
        i, u = state
        u = lax.stop_gradient(a) @ u + lax.stop_gradient(b) @ u
        return i + 1, u / jnp.sqrt((u * u).sum())

    _, u = lax.while_loop(lambda s: s[0] < 3, body, (0, jnp.ones(SIZE)))
    return a @ u / 9


def rounded(a, b):
    """A loop of rounded numbers, which have no gradient."""
    whole = jnp.floor(4 * a)
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * whole), (0, whole))[1] * b


def state_space(a, b):
    """A diagonal state space of complex numbers, by an associative scan."""
    rate = jnp.exp(lax.complex(-jnp.exp(a[0]), b[0]))
    rates = jnp.broadcast_to(rate, (SIZE, SIZE))

    def join(x, y):
        return x[0] * y[0], y[0] * x[1] + y[1]

    return lax.associative_scan(join, (rates, (a @ b).astype(jnp.complex64)))[1].real


SAVEABLE = jax.checkpoint_policies.dots_saveable
OPERATIONS = {
    "products": lambda a, b: jnp.tanh(a @ b) / (1 + jnp.abs(a)),
    "whole numbers": lambda a, b: a * (3 * b).astype(jnp.int32),
    "narrow": lambda a, b: a.astype(jnp.bfloat16) @ b.astype(jnp.bfloat16),
    "remat": jax.checkpoint(lambda a, b: jnp.sin(jnp.tanh(a @ b))),
    "remat with a policy": jax.checkpoint(lambda a, b: jnp.sin(jnp.tanh(a @ b)), policy=SAVEABLE),
    "scan": lambda a, b: lax.scan(lambda c, row: (jnp.tanh(c @ b + row), c), a[0], a)[1],
    "switch": lambda a, b: lax.switch((a[0] > 0).sum() % 2, [jnp.multiply, jnp.add], a, b),
    "power iteration": until_small,
    "rounded floor": rounded,
    "ref": with_a_ref,
    "pure_callback": stopped(on_the_host),
    "complex": lambda a, b: lax.complex(a, b) @ lax.complex(b, a),
    "complex remat": lambda a, b: jax.checkpoint(lambda z: jnp.exp(z) * z)(lax.complex(a, b)),
    "complex branches": lambda a, b: lax.cond(a[0, 0] > 0, jnp.exp, jnp.conj, lax.complex(a, b)),
    "rfft": lambda a, b: jnp.fft.irfft(jnp.fft.rfft(jnp.tanh(a)) * jnp.fft.rfft(b), n=SIZE),
    "state space": state_space,
}


def total(results):
    """One number of all entries, of complex ones too, each with a weight of its own."""

    def one(x):
        x = x.ravel() if jnp.iscomplexobj(x) else x.ravel().astype(jnp.float32)
        weights = jnp.cos(jnp.arange(x.size))
        return (jnp.real(x) * weights + jnp.imag(x) * weights[::-1]).sum()

    return sum(map(one, jax.tree.leaves(results)))


def by_a_rule(f):
    rule = jax.custom_vjp(f)
    rule.defvjp(lambda a, b: jax.vjp(f, a, b), lambda pullback, g: pullback(g))
    return rule


def by_a_forward_rule(f):
    rule = jax.custom_jvp(f)
    rule.defjvp(lambda ins, tangents: jax.jvp(f, ins, tangents))
    return rule


def in_a_scan(f):
    def body(carry, _):
        a, b = carry
        return (a / 2 + b / 4, b), f(a, b)

    return lambda a, b: lax.scan(body, (a, b), length=2)[1]


def in_a_branch(f):
    return lambda a, b: lax.cond(a[0, 0] > -9, lambda: total(f(a, b)), lambda: total(a * b))


def in_a_loop(f):
    """Of parameters without a gradient, multiplied by those that have one."""

    def function(a, b):
        def body(state):
            return state[0] + 1, state[1] / 2 + total(f(*map(lax.stop_gradient, (a, b))))

        return lax.while_loop(lambda s: s[0] < 2, body, (0, 0.0))[1] * total(a * b)

    return function


PLACES = {
    "alone": lambda f: f,
    "call": jax.jit,
    "custom_vjp": by_a_rule,
    "custom_jvp": by_a_forward_rule,
    "remat": jax.checkpoint,
    "scan": in_a_scan,
    "layers": lambda f: f,  # and of stacked parameters, of which each step has a slice
    "cond": in_a_branch,
    "while": in_a_loop,
}


def loss_of(operation, place):
    f = PLACES[place](OPERATIONS[operation])

    def loss(params, rows):
        a, b, layers = params["a"], params["b"], params["layers"]
        mixed = a + rows.T @ rows / 9
        result = total(f(a, b)) + total(f(mixed, b)) * params["scale"]
        if place == "layers":
            _, outs = lax.scan(
                lambda c, w: (c + w / 9, OPERATIONS[operation](w, c / 9)), mixed, layers
            )
            result += total(outs)
        return result

    return loss


def make_params():
    rng = np.random.default_rng(0)
    shapes = {"a": (SIZE, SIZE), "b": (SIZE, SIZE), "layers": (3, SIZE, SIZE), "scale": ()}
    return {k: np.float32(rng.normal(size=shape) / 2) for k, shape in shapes.items()}


def make_rows():
    return np.float32(np.random.default_rng(1).normal(size=(2 * NUM, SIZE)))


def of_one_device(loss, params, rows):
    def mean(params):
        shares = jnp.split(rows, NUM)
        return sum(loss(params, share) for share in shares) / NUM

    return jax.jit(jax.value_and_grad(mean))(params)


def fully_sharded(loss, params, rows):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:NUM]), ("data",))
    placement = FSDP().placement(Reducer("data", (64,), *choose_packing("leaf", None), None), mesh)
    layouts = jax.tree.map(lambda x: placement.layout(x.shape), params)
    specs = jax.tree.map(lambda x: x.spec("data"), layouts)

    def replica(params, rows):
        run = placement.source(layouts).linearize(lambda x: (loss(x, rows), ()), params)
        grads = run[1](jnp.float32(1))[0]
        whole = {"scale": lax.pmean(grads["scale"], "data")}
        return lax.pmean(run[0], "data"), grads | whole

    mapped = over_replicas(replica, mesh, (specs, P("data")), (P(), specs))
    return jax.jit(mapped)(params, rows)


# JAX has no rule for a reference inside a custom rule that is computed again.
LEFT_OUT = {("ref", "custom_jvp")}
# A gradient that stops in a loop, complex numbers alone and inside a rule.
QUICK = {
    ("power iteration", "alone"),
    ("rounded floor", "cond"),
    ("rfft", "custom_vjp"),
    ("state space", "layers"),
    ("pure_callback", "while"),
}
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.long)
    for case in itertools.product(OPERATIONS, PLACES)
    if case not in LEFT_OUT
]


@pytest.mark.parametrize(("operation", "place"), CASES)
def test_gradients_are_those_of_one_device(operation, place):
    params, rows, loss = make_params(), make_rows(), loss_of(operation, place)
    want, got = of_one_device(loss, params, rows), fully_sharded(loss, params, rows)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(want))
    # Sums of two replicas in another order, fused in other ways; decompositions magnify it.
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5 * max(1, np.abs(y).max()))
