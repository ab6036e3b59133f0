"""Trains through `jddp.DataParallel` and on one device side by side, and compares every step."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from oracle import on_one_device, whole_batch_step

import jddp
from jddp.inspection.collectives import collectives
from jddp.inspection.hlo import read_program

REPLICAS, ROWS, WIDTH = 4, 16, 4
BUCKET_MB = 80 / 2**20  # Several buckets even of a tiny model.

# Flat buckets that are reduced at the end are held to those that are reduced when they are ready by
# tests/engine/test_overlap.py.
PLACES = {
    "leaf-end": {"reduction": jddp.Reduction(layout="leaf", overlap=False)},
    "flat-ready": {"reduction": jddp.Reduction(layout="flat", overlap=True)},
}
in_both_places = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


def joined(*given, **more):
    """Options of DataParallel; two reductions become one, with the values that either sets."""
    options = {}
    for name, value in (pair for each in (*given, more) for pair in each.items()):
        if name == "reduction":
            reductions = [jddp.Reduction.chosen(x, name) for x in (options.get(name), value)]
            values = [
                {field: getattr(x, field) for field in x.model_fields_set} for x in reductions
            ]
            value = jddp.Reduction(**values[0] | values[1])
        options[name] = value
    return options


class Net(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(WIDTH, name="first")(x))
        return nn.Dense(1, name="last")(x)[:, 0]


class Either(nn.Module):
    """Two branches, of which a loss may choose."""

    def setup(self):
        self.a, self.b = Net(), Net()

    def __call__(self, x):
        return self.a(x) + self.b(x)


class Plane(nn.Module):
    """Weights of gradient r on replica r, if its rows are r: their mean is (R - 1) / 2."""

    shape: tuple[int, int] = (2, 2)

    @nn.compact
    def __call__(self, x):
        return self.param("w", nn.initializers.zeros, self.shape).sum() * x


def make_rows(num=ROWS, *, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x).sum(-1)}


def squares(model, batch):
    return (model(batch["x"]) - batch["y"]) ** 2


def wrapped(model, loss=squares, *, optimizer=None, **options):
    # The state of momentum is, after one step, the gradient.
    optimizer = optimizer or optax.sgd(0.1, momentum=0.9)
    options = joined({"mesh": REPLICAS, "reduction": jddp.Reduction(bucket_mb=BUCKET_MB)}, options)
    return jddp.DataParallel(model, optimizer, loss, **options)


def start(ddp, batch):
    """A first state with numbers of ours: Flax's own take a second to compile."""
    if ddp.steps.spec.model.values is not None:
        return ddp.init(0, batch)
    rng = np.random.default_rng(0)

    def numbers(x):
        values = rng.normal(size=x.shape) + (1j * rng.normal(size=x.shape) if is_complex(x) else 0)
        return (0.5 * values).astype(x.dtype)

    shapes = ddp.steps.abstract_state(batch)
    given = {"params": shapes.params, **shapes.model_state}
    return ddp.init(0, batch, params=jax.tree.map(numbers, given))


def beside_one_device(
    model, loss=squares, *, alone=None, batches=None, rtol=1e-5, places=PLACES, **options
):
    """Steps one device through `batches`, then many in some places; returns the last of these.

    `alone` is the loss on one device, if it is another one. 1e-5 of the largest entry: float32
    sums of 16 rows in another order.
    """
    batches = batches or [make_rows(), make_rows(seed=1)]
    all_steps = None
    for place in places:
        ddp = wrapped(model, loss, **joined(PLACES[place], options))
        state = start(ddp, batches[0])
        if all_steps is None:
            optimizer = ddp.steps.spec.optimizer.tx
            all_steps = steps_of_one_device(model, optimizer, alone or loss, state, batches)
        first = on_one_device(state)
        for batch, (want, want_metrics) in zip(batches, all_steps, strict=True):
            state, metrics = ddp.step(state, batch)
            assert_close_step(on_one_device(state), want, first, rtol=rtol, what=f"{place}: ")
            np.testing.assert_allclose(metrics["loss"], want_metrics["loss"], rtol=rtol)
        assert_same_on_all_devices(state)
    return ddp, state


def assert_close_step(got, want, before, *, rtol, what=""):
    """How parameters and their average have moved, and all other state but random keys."""
    for name in ("params", "ema_params"):
        old, new, judged = (host(getattr(state, name)) for state in (before, got, want))
        moved, want_moved = (jax.tree.map(np.subtract, x, old) for x in (new, judged))
        assert_close(moved, want_moved, rtol=rtol, what=what + name)
    assert_close(got.opt_state, want.opt_state, rtol=rtol, what=f"{what}opt_state")
    kept = [{k: x for k, x in s.model_state.items() if k != "rngs"} for s in (got, want)]
    assert_close(*kept, rtol=rtol, what=f"{what}model_state")


def steps_of_one_device(model, optimizer, loss, state, batches):
    """The state and the metrics after each of the batches."""
    step = whole_batch_step(model, optimizer, lambda m, b, train: (loss(m, b), {}))
    first = on_one_device(state), {}
    return list(itertools.accumulate(batches, lambda s, b: step(s[0], b), initial=first))[1:]


def sent(ddp, batch=None):
    """The collectives of the compiled step."""
    text = ddp.steps.lower(make_rows() if batch is None else batch).compile().as_text()
    return collectives(read_program(text))


def host(tree):
    """Its arrays as those of NumPy, which has no keys: of them the data."""

    def plain(x):
        is_key = jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)
        return np.array(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(plain, jax.device_get(tree))


def leaves_with_path(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


def at(tree, path):
    for entry in path:
        tree = tree[entry.key]
    return tree


def is_float(x):
    return jnp.issubdtype(x.dtype, np.inexact)


def is_complex(x):
    return jnp.issubdtype(x.dtype, np.complexfloating)


def assert_close(got, want, *, rtol, what=""):
    """Close relative to the largest entry of the whole tree; integers are equal."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    floats = [np.asarray(x, complex) for x in jax.tree.leaves(want) if is_float(x) and x.size]
    atol = rtol * max([1e-3, *(np.abs(x).max() for x in floats)])
    for (path, a), b in zip(leaves_with_path(got), jax.tree.leaves(want), strict=True):
        where = what + jax.tree_util.keystr(path)
        assert a.dtype == b.dtype, where
        exact = [np.asarray(x).astype(complex if is_complex(x) else np.float64) for x in (a, b)]
        np.testing.assert_allclose(*exact, rtol=0, atol=atol if is_float(b) else 0, err_msg=where)


def assert_same_on_all_devices(state):
    for path, leaf in leaves_with_path((state.params, state.model_state, state.opt_state)):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
            for other in others:
                np.testing.assert_array_equal(other, first, err_msg=jax.tree_util.keystr(path))
