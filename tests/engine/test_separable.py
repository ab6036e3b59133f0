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
    "a derivative of its own": lambda x, y, s: jax.nn.relu(x) + jax.checkpoint(jnp.tanh)(y),
}
MIXING = {
    "reduce_sum": lambda x, y, s: x / jnp.sqrt((x**2).sum()),
    "dot_general": lambda x, y, s: x @ jnp.ones((4, 4)),
    "cumsum": lambda x, y, s: jnp.cumsum(x, axis=0),
    "rev": lambda x, y, s: x[::-1] + y,
    "iota": lambda x, y, s: x + jax.lax.iota(x.dtype, 24).reshape(x.shape),
    "constant": lambda x, y, s: x * np.ones((6, 4), np.float32),
    "in a branch": lambda x, y, s: jax.lax.cond(s > 0, lambda: x, lambda: (y.T + 0).T),
}
SHAPED = {
    "a number": lambda x, y, s: x * x.shape[0],
    "the length of a loop": lambda x, y, s: (
        x + jax.lax.fori_loop(0, x.shape[0], lambda i, s: s * 2, s)
    ),
    "another array": lambda x, y, s: x + (x if x.shape[1] > 1 else y),
}


def test_what_mixes_elements_and_what_depends_on_shapes_is_known():
    for name, function in (ELEMENTWISE | MIXING | SHAPED).items():
        assert mixes(function) == (name in MIXING), name
        assert name in MIXING or depends_on_shapes(function) == (name in SHAPED), name


def test_arrays_of_equal_and_of_other_shapes_do_not_confuse_it():
    """Parts may have one shape where the arrays have two."""
    whole, part = (
        [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
        for shapes in (((4, 6), (6, 4), (25,)), ((12, 1), (12, 1), (13,)))
    )
    assert is_same(optax.adamw(1e-3).init, [whole], [part])


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
