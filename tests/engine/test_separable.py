"""What an optimizer's equations say: whether it works element by element."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jddp.engine.optimizer import is_elementwise, is_same, mixes_elements
from jddp.reduce.shards import AlongDim, Flat, Groups

ARRAY, ITS_PART = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((6, 4), (12, 1)))
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def mixes(function):
    return not is_elementwise(function, ARRAY, ARRAY, SCALAR)


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
    assert not mixes(function)
    assert not depends_on_shapes(function)


SHAPED = {
    "a number": lambda x, y, s: x * x.shape[0],
    "the length of a loop": lambda x, y, s: (
        x + jax.lax.fori_loop(0, x.shape[0], lambda i, s: s * 2, s)
    ),
    "a number in a branch": lambda x, y, s: jax.lax.cond(s > 0, lambda: x * x.shape[1], lambda: x),
    "another array": lambda x, y, s: x + (x if x.shape[1] > 1 else y),
}


def test_what_mixes_elements_and_what_depends_on_shapes_is_found():
    for name, function in MIXING.items():
        assert mixes(function), name
    for name, function in SHAPED.items():
        assert depends_on_shapes(function), name
    by_dims = optax.add_decayed_weights(0.1, mask=lambda x: x.ndim > 1)
    assert not depends_on_shapes(lambda x, y, s: by_dims.update(x, by_dims.init(y), y)[0])
    by_columns = optax.add_decayed_weights(0.1, mask=lambda x: x.shape[1] > 1)

    def decay(x, y, s):
        return by_columns.update(x, by_columns.init(y), y)[0]

    assert not mixes(decay)
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


@pytest.mark.parametrize("division", [Flat("data", 2), AlongDim("data", Groups(2))])
def test_an_optimizer_needs_whole_arrays_unless_it_updates_each_element_by_itself(division):
    shapes = shapes_of(a=(4, 6), b=(6, 4), c=(5,), d=())
    in_parts = {
        "adamw": optax.adamw(0.1),
        "lion": optax.lion(0.1),
        "schedule_free": optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
        "clip": optax.chain(optax.clip(1.0), optax.sgd(0.1)),
    }
    whole = {
        "muon": optax.contrib.muon(0.1),
        "lamb": optax.lamb(0.1),
        "lars": optax.lars(0.1),
        "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
        "clip_by_global_norm": optax.clip_by_global_norm(1.0),
        "a mask by size": optax.adamw(
            0.1, mask=lambda params: jax.tree.map(lambda x: x.size > 20, params)
        ),
        "shapes written down": optax.stateless(
            lambda grads, params: {**grads, "a": grads["a"].reshape(2, 12).reshape(4, 6)}
        ),
    }
    assert [name for name, tx in in_parts.items() if mixes_elements(tx, shapes, division)] == []
    assert [name for name, tx in whole.items() if not mixes_elements(tx, shapes, division)] == []
