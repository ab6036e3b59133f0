"""Questions to the equations of a program, where a search in its text gives a wrong answer."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jddp.ground.jaxprs import axes_of, equations, follow, has_random_bits

KEY, X = jax.random.key(0), jnp.ones(3)


def traced(function, *given, axes=()):
    return jax.make_jaxpr(function, axis_env=axes)(*given).jaxpr


def in_branches_of_loops(function):
    """`function(x)`, in a branch in a scan in a while loop in a jitted, rematerialised function."""

    def branch(x):
        return lax.cond(x.sum() > 0, lambda x: x + function(x), lambda x: x, x)

    def loop(x):
        return lax.scan(lambda x, _: (branch(x), None), x, None, length=2)[0]

    return jax.jit(jax.checkpoint(lambda x: lax.while_loop(lambda x: x.sum() < 9, loop, x)))


DRAWS = {
    "gamma": lambda key: jax.random.gamma(key, 2.0, (3,)),  # a primitive of its own
    "of an old key": lambda key: jax.random.uniform(jax.random.key_data(key)),
    "of the device": lambda key: lax.rng_uniform(0.0, 1.0, (3,)),
    "of a generator": lambda key: lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (3,)),
    "deep inside": lambda key: in_branches_of_loops(lambda x: x + jax.random.normal(key))(X),
}


@pytest.mark.parametrize("function", DRAWS.values(), ids=DRAWS)
def test_who_draws_random_numbers_is_known(function):
    assert has_random_bits(traced(function, KEY))


def test_names_and_keys_alone_draw_no_random_numbers():
    def random_bits(x):
        return 2 * x

    program = traced(jax.jit(random_bits), X)
    assert "random_bits" in str(program)
    assert not has_random_bits(program)
    split = traced(lambda key: jax.random.split(jax.random.fold_in(key, 1)), KEY)
    assert not has_random_bits(split)


def test_collectives_are_known_by_their_axes():
    def of_data(function, *axes):
        program = traced(function, X, axes=[(axis, 2) for axis in axes])
        return any("data" in axes_of(eqn) for eqn in equations(program))

    for function in (
        lambda x: lax.psum(x, ("model", "data")),
        lambda x: lax.all_gather(x, "data", axis_index_groups=[[0], [1]]),
        lambda x: x + lax.axis_index("data"),
        in_branches_of_loops(lambda x: lax.pmean(x, "data")),
    ):
        assert of_data(function, "data", "model")
    for axis in ("model", "data-2"):
        assert not of_data(lambda x, axis=axis: lax.psum(x, axis).sum(0), axis)


def labels_products(eqn, labels):
    """Leaves all equations but products to `follow`."""
    return [9] if eqn.primitive.name == "mul" else None


def chosen(i, x, y):
    return lax.switch(i, [lambda x, y: x, lambda x, y: y], x, y)


def counted(x, y):
    return lax.while_loop(lambda both: both[0] < y, lambda both: (both[0] + 1, both[1] + 1), (x, x))


def passed_on(x, y, z):
    """In each step of the scan a label goes one further."""
    return lax.scan(lambda carry, _: ((z, carry[0], carry[1]), carry[2]), (x, y, x), length=3)


FOLLOWED = {
    "constants": (lambda x: (x + 1, jnp.ones(2)), [3], [3, 0]),
    "the largest": (lambda x, y: (x + y, y), [1, 2], [2, 2]),
    "a product": (lambda x, y: x * y, [1, 2], [9]),
    "a call": (lambda x, y: jax.jit(lambda x, y: (y, x * 2))(x, y), [1, 2], [2, 9]),
    "a branch": (chosen, [0, 1, 2], [2]),
    "what chooses a branch": (chosen, [3, 1, 2], [3]),
    "what ends a loop": (counted, [1, 2], [2, 2]),
    "what goes round": (passed_on, [0, 1, 2], [2, 2, 2, 2]),
}


@pytest.mark.parametrize("function, given, wanted", FOLLOWED.values(), ids=FOLLOWED)
def test_labels_are_followed_from_the_inputs_to_the_results(function, given, wanted):
    program = traced(function, *[0] * len(given))
    assert follow(program, given, labels_products) == wanted
