"""Digests of equations: equal for equal programs, whatever else differs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jddp.engine.canonical import Reader

X = jnp.ones((4, 3))


def digests(function, *args, axis="data", **options):
    traced = jax.make_jaxpr(function)(*args)
    reader = Reader(("outer", "inner"), axis=axis, **options)
    values = map(reader.value, traced.consts)
    reader.read(traced.jaxpr, dict(zip(traced.jaxpr.constvars, values, strict=True)))
    return reader.digests()


def nest(inner=jax.nn.relu, outer=jnp.sum):
    def function(x):
        x = x + 1  # of no part
        with jax.named_scope("outer"):
            with jax.named_scope("inner"):
                x = inner(x)
            return outer(x)

    return function


def test_a_part_does_not_depend_on_the_others():
    base = digests(nest(), X)
    assert base.keys() == {"outer", "inner"}
    others = digests(nest(inner=jnp.tanh), X), digests(nest(outer=jnp.max), X)
    assert [x["outer"] == base["outer"] for x in others] == [True, False]
    assert [x["inner"] == base["inner"] for x in others] == [False, True]


def scaled_by(number):
    """A new function for each call, at an address of its own."""

    @jax.custom_jvp
    def function(x):
        return x * number

    function.defjvp(lambda x, t: (function(*x), 3 * t[0]))
    return function


SAME = {
    "new functions": [lambda: nest(inner=scaled_by(2)), lambda: nest(inner=scaled_by(2))],
    "copies of constants": [
        lambda: nest(inner=lambda x: x * np.full((4, 3), 2.0)) for _ in range(2)
    ],
    "jitted anew": [lambda: nest(inner=jax.jit(lambda x: x * 2)) for _ in range(2)],
    "loops": [lambda: nest(inner=lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x + i, x))] * 2,
}
DIFFERENT = {
    "constants of a function": [lambda n=n: nest(inner=scaled_by(n)) for n in (2, 3)],
    "constant arrays": [lambda n=n: nest(inner=lambda x: x * np.full((4, 3), n)) for n in (2, 3)],
    "keys": [
        lambda n=n: nest(inner=lambda x: x + jax.random.normal(jax.random.key(n))) for n in (1, 2)
    ],
    "operands": [
        lambda: nest(inner=lambda x: x - x.T.T * 2),
        lambda: nest(inner=lambda x: x * 2 - x),
    ],
    "inside a loop": [
        lambda n=n: nest(inner=lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x + n * i, x))
        for n in (1.0, 2.0)
    ],
    "branches": [
        lambda n=n: nest(inner=lambda x: jax.lax.cond(x.sum() > 0, lambda: x, lambda: n * x))
        for n in (1.0, 2.0)
    ],
    "axes of a sum": [lambda n=n: nest(outer=lambda x: x.sum(n)) for n in (0, 1)],
}


@pytest.mark.parametrize("first, second", SAME.values(), ids=SAME)
def test_equal_programs_have_equal_digests(first, second):
    assert digests(first(), X) == digests(second(), X)


@pytest.mark.parametrize("first, second", DIFFERENT.values(), ids=DIFFERENT)
def test_programs_that_compute_something_else_have_others(first, second):
    assert digests(first(), X) != digests(second(), X)


def test_gradients_belong_to_the_part_of_their_function_also_those_of_custom_derivatives():
    def gradient(rule):
        @jax.custom_jvp
        def square(x):
            return x * x

        square.defjvp(rule)
        return digests(jax.grad(nest(inner=square)), X)

    twice = gradient(lambda x, t: (square_of(x), 2 * x[0] * t[0]))
    thrice = gradient(lambda x, t: (square_of(x), 3 * x[0] * t[0]))
    assert twice["outer"] == thrice["outer"]
    assert twice["inner"] != thrice["inner"]


def square_of(x):
    return x[0] * x[0]


def test_the_name_of_the_axis_does_not_count():
    def over(axis):
        inside = jax.vmap(nest(inner=lambda x: jax.lax.all_gather(x, axis)), axis_name=axis)
        mesh = jax.sharding.AbstractMesh((2,), (axis,))
        mapped = jax.shard_map(
            nest(inner=lambda x: jax.lax.psum(x, axis)),
            mesh=mesh,
            in_specs=jax.P(axis),
            out_specs=jax.P(),
            check_vma=False,
        )
        return digests(inside, X, axis=axis), digests(mapped, X, axis=axis)

    assert over("data") == over("batch")


def test_shapes_count_where_they_are_asked_for():
    other = jnp.ones((8, 3))
    assert digests(nest(), X) != digests(nest(), other)
    assert digests(nest(), X, with_shapes=False) == digests(nest(), other, with_shapes=False)
