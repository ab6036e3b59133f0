"""What an optimizer's equations say: whether it works element by element."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jddp.engine.separable import Inseparable, divided_update, find_mixing, is_same
from jddp.reduce.shards import AlongDim, Flat, Groups

ARRAY, ITS_PART = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((6, 4), (12, 1)))
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def mixing(function):
    return find_mixing(function, ARRAY, ARRAY, SCALAR)


def depends_on_shapes(function):
    return not is_same(function, (ARRAY, ARRAY, SCALAR), (ITS_PART, ITS_PART, SCALAR))


ELEMENTWISE = {
    "arithmetic": lambda x, y, s: (x * s + y / (jnp.sqrt(y**2) + 1e-8), s + 1),
    "a choice by each element": lambda x, y, s: jnp.where(x > y, x, s),
    "a choice by a number": lambda x, y, s: jax.lax.cond(s > 0, lambda: x + y, lambda: x),
    "a jitted part": lambda x, y, s: jax.jit(jnp.tanh)(x) + jax.jit(lambda z: z * s)(y),
    "arrays of one number": lambda x, y, s: jnp.full(x.shape, s) + jnp.zeros_like(y),
    "a sum that nobody uses": lambda x, y, s: (x.sum(), x + y)[1],
    "a derivative of its own": lambda x, y, s: jax.nn.relu(x) + y,
    "something that is not kept": lambda x, y, s: jax.checkpoint(jnp.tanh)(x) + y,
}

MIXING = {
    "reduce_sum": lambda x, y, s: x / jnp.sqrt((x**2).sum()),
    "dot_general": lambda x, y, s: x @ jnp.ones((4, 4)),
    "cumsum": lambda x, y, s: jnp.cumsum(x, axis=0),
    "sort": lambda x, y, s: jnp.sort(x, axis=0),
    "rev": lambda x, y, s: x[::-1] + y,
    "iota": lambda x, y, s: x + jax.lax.iota(x.dtype, 24).reshape(x.shape),
    "constant": lambda x, y, s: x * np.ones((6, 4), np.float32),
    "reduce_max": lambda x, y, s: jax.lax.cond(x.max() > 0, lambda: x, lambda: y),
    "transpose": lambda x, y, s: jax.lax.cond(s > 0, lambda: x, lambda: (y.T + 0).T),
    "reduce": lambda x, y, s: x + jax.lax.reduce(y, jnp.float32(0), lambda a, b: a + 2 * b, (0, 1)),
}


@pytest.mark.parametrize("function", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_what_works_element_by_element_is_known(function):
    assert mixing(function) == ""
    assert not depends_on_shapes(function)


SHAPED = {
    "a number": lambda x, y, s: x * x.shape[0],
    "the length of a loop": lambda x, y, s: (
        x + jax.lax.fori_loop(0, x.shape[0], lambda i, s: s * 2, s)
    ),
    "a number in a branch": lambda x, y, s: jax.lax.cond(s > 0, lambda: x * x.shape[1], lambda: x),
    "another array": lambda x, y, s: x + (x if x.shape[1] > 1 else y),
}


def test_what_mixes_elements_is_named_and_what_depends_on_shapes_is_found():
    for name, function in MIXING.items():
        assert name in mixing(function)
    for name, function in SHAPED.items():
        assert depends_on_shapes(function), name
    by_dims = optax.add_decayed_weights(0.1, mask=lambda x: x.ndim > 1)
    assert not depends_on_shapes(lambda x, y, s: by_dims.update(x, by_dims.init(y), y)[0])
    by_columns = optax.add_decayed_weights(0.1, mask=lambda x: x.shape[1] > 1)

    def decay(x, y, s):
        return by_columns.update(x, by_columns.init(y), y)[0]

    assert mixing(decay) == ""
    assert depends_on_shapes(decay)


def test_arrays_of_equal_and_of_other_shapes_do_not_confuse_it():
    """Parts may have one shape where the arrays have two, and calls be shared that were not."""
    whole = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 6), (6, 4), (25,))]
    part = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((12, 1), (12, 1), (13,))]
    assert is_same(optax.adamw(1e-3).init, [whole], [part])

    # JAX traces a branch once for each shape, and prints what stands in two places once.
    def up(x):
        return x + 1

    def down(x):
        return x - 1

    def step(x, y, s):
        return jax.lax.cond(s > 0, up, down, x), jax.lax.cond(s > 0, up, down, y)

    assert is_same(step, (*whole[:2], SCALAR), (*part[:2], SCALAR))


def shapes_of(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def by_norm(axis=None):
    """Divides each gradient by its largest element, or each of its slices by theirs."""

    def one(x):
        axes = tuple(range(x.ndim))[axis:]
        return x / (jnp.abs(x).max(axes, keepdims=True) + 1)

    return optax.stateless(lambda grads, params: jax.tree.map(one, grads))


def found_in(tx, **shapes):
    """Parameters by how they are updated: positions of those in parts, in slices and whole."""
    update = divided_update(tx, shapes_of(**shapes), Flat("data", 2))
    in_parts = [x for x in update.in_parts[1].results if x < len(shapes)]
    return in_parts, *(
        [x.results[0] for x in update.owned if x.sliced is sliced] for sliced in (True, False)
    )


def test_each_parameter_is_judged_by_its_own_equations():
    shapes = {"a": (4, 6), "b": (4, 6), "c": (6, 4), "d": (3, 4, 6), "e": (5,), "f": ()}
    muon = optax.contrib.muon(
        0.1,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(
            lambda x: optax.contrib.MuonDimensionNumbers(-2, -1) if x.ndim > 1 else None, params
        ),
    )
    # Two of one shape are updated together; those that Adam updates, in parts.
    assert found_in(muon, **shapes) == ([4, 5], [(3,)], [(0, 1), (2,)])
    assert found_in(by_norm(), **shapes) == ([], [], [(0, 1), (2,), (3,), (4,), (5,)])
    assert found_in(by_norm(1), a=(4, 6), b=(4, 6)) == ([], [(0,), (1,)], [])
    assert divided_update(optax.adam(0.1), shapes_of(**shapes), Flat("data", 2)) is None
    decayed = optax.masked(by_norm(), {"a": True, "b": False})
    assert found_in(decayed, a=(4, 6), b=(4, 6)) == ([1], [], [(0,)])
    # Equal equations with another constant are not the same.
    rates = optax.chain(by_norm(), optax.masked(optax.scale(2.0), {"a": True, "b": False}))
    assert found_in(rates, a=(4, 6), b=(4, 6)) == ([], [], [(0,), (1,)])


def test_slices_that_depend_on_each_other_are_not_separated():
    def judge(function):
        return found_in(
            optax.stateless(lambda grads, params: jax.tree.map(function, grads)), a=(3, 4, 3)
        )

    kept = {
        "products": jax.vmap(lambda x: x @ x.T @ x),
        "sums": lambda x: x * x.sum((1, 2), keepdims=True),
        "factors": jax.vmap(lambda x: x @ jnp.linalg.qr(x)[1]),
        "reshapes": lambda x: (x.reshape(len(x), 12) / x.max((1, 2))[:, None]).reshape(x.shape),
    }
    mixed = {
        "products": lambda x: jnp.einsum("iaj,jbk->iak", x, x),
        "sums": lambda x: x * x.sum(0, keepdims=True),
        "transposes": lambda x: x * jnp.swapaxes(x, 0, 2),
        "reversal": lambda x: x * x[::-1].max((1, 2), keepdims=True),
        "places": lambda x: x * x.max((1, 2), keepdims=True) * jnp.arange(3.0)[:, None, None],
        "shapes written down": lambda x: (x.reshape(3, 12) / x.max((1, 2))[:, None]).reshape(
            3, 4, 3
        ),
        "numbers of slices": lambda x: x * x.max((1, 2), keepdims=True) * len(x),
    }
    for name, function in kept.items():
        assert judge(function) == ([], [(0,)], []), name
    for name, function in mixed.items():
        assert judge(function) == ([], [], [(0,)]), name


def test_parameters_that_depend_on_each_other_are_refused_with_the_operation():
    shapes = shapes_of(a=(4, 6), b=(4, 6))
    for tx, name in (
        (optax.clip_by_global_norm(1.0), "'add'"),
        (
            optax.stateless(lambda grads, params: {**grads, "a": grads["b"] * grads["a"].max()}),
            "mul",
        ),
    ):
        with pytest.raises(Inseparable, match=f"{name}.* several parameters"):
            divided_update(tx, shapes, AlongDim("data", Groups(2)))
    number = optax.GradientTransformation(
        lambda params: jnp.float32(0), lambda grads, state, params=None: (grads, grads["a"].max())
    )
    with pytest.raises(Inseparable, match="keeps a number"):
        divided_update(number, shapes, AlongDim("data", Groups(2)))
