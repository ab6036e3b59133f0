"""Trains through `jddp.DataParallel` and on one device side by side, and compares every step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from oracle import vmapped_step, whole_batch_step, with_metrics

import jddp
from jddp.inspection.hlo import collectives, read_program

REPLICAS, ROWS, WIDTH = 4, 16, 4
BUCKET_MB = 80 / 2**20  # Several buckets even of a tiny model.

# Flat buckets that are reduced at the end are held to those that are reduced when they are ready by
# tests/engine/test_overlap.py.
PLACES = {
    "leaf-end": {"reduction": jddp.Reduction(layout="leaf", overlap=False)},
    "flat-ready": {"reduction": jddp.Reduction(layout="flat", overlap=True)},
}
STRATEGIES = {
    **PLACES,
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp kept": {"strategy": jddp.FSDP(regather=False)},
    "groups": {"strategy": jddp.FSDP(group_size=2)},
    "logical": {"strategy": jddp.LogicalReplicas(8)},
}
in_both_places = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


def joined(*given, **more):
    """Options of DataParallel; two reductions become one, with the values that either sets."""
    options = {}
    for name, value in (pair for each in (*given, more) for pair in each.items()):
        if name == "reduction":
            reductions = [jddp.Reduction.chosen(x, name) for x in (options.get(name), value)]
            values = [{key: getattr(x, key) for key in x.model_fields_set} for x in reductions]
            value = jddp.Reduction(**values[0] | values[1])
        options[name] = value
    return options


class Net(nn.Module):
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


def make_rows(num=ROWS, *, seed=0):
    x = np.random.default_rng(seed).normal(size=(num, WIDTH)).astype(np.float32)
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


def beside_one_device(model, loss=squares, *, places=PLACES, begin=start, batches=None, **options):
    """Holds a model to one device in each of some places; returns the last wrapper and state."""
    batches = batches or [make_rows(), make_rows(seed=1)]
    for place in places:
        placed = joined({"mesh": REPLICAS}, STRATEGIES[place], options)
        ddp, state = hold(model, loss, batches, begin=begin, what=f"{place}: ", **placed)
    return ddp, state


def hold(model, loss, batches, *, begin=start, alone=None, rtol=1e-5, what="", **options):
    """Steps many devices and one, whose loss may be `alone`, each time from the same state."""
    ddp = wrapped(model, loss, **options)
    state = begin(ddp, batches[0])
    tx, strategy = ddp.steps.spec.optimizer.tx, options.pop("strategy", "ddp")
    if ddp.steps.planned(batches[0]).uses_rng:
        is_logical = isinstance(strategy, jddp.LogicalReplicas)
        num = strategy.number if is_logical else options["mesh"]
        step = vmapped_step(wrapped(model, loss, **{**options, "mesh": num}), num, batches[0])
    else:
        known = {name: options.get(name) for name in ("max_grad_norm", "ema_decay")}
        step = whole_batch_step(model, tx, with_metrics(alone or loss), **known)
    like = jax.eval_shape(tx.init, state.params)
    for batch in batches:
        before = on_one_device(state, like)
        want, want_metrics = step(before, batch)
        state, metrics = ddp.step(state, batch)
        assert_close_step(on_one_device(state, like), want, before, rtol=rtol, what=what)
        for name, value in want_metrics.items():
            np.testing.assert_allclose(metrics[name], value, rtol=rtol, err_msg=what + name)
    if strategy == "ddp":
        assert_same_on_all_devices(state)
    return ddp, state


def on_one_device(state, like=None):
    """A copy of all arrays, whole on a device; the optimizer's state has the form of `like`."""

    def copied(x):
        whole = x.is_fully_replicated
        return jnp.copy(x.addressable_data(0) if whole else jax.device_put(x, jax.devices()[0]))

    state = jax.tree.map(copied, state)
    if like is None:
        return state

    def without_padding(x, like):
        return x if x.shape == like.shape else x.ravel()[: like.size].reshape(like.shape)

    return state.replace(opt_state=jax.tree.map(without_padding, state.opt_state, like))


def assert_close_step(got, want, before, *, rtol, what=""):
    """How parameters and their average have moved, and all other state but random keys."""
    for name in ("params", "ema_params"):
        old, new, judged = (host(getattr(state, name)) for state in (before, got, want))
        moved, want_moved = (jax.tree.map(np.subtract, x, old) for x in (new, judged))
        assert_close(moved, want_moved, rtol=rtol, what=what + name)
    assert_close(host(got.opt_state), host(want.opt_state), rtol=rtol, what=f"{what}opt_state")
    kept = [{k: x for k, x in s.model_state.items() if k != "rngs"} for s in (got, want)]
    assert_close(*kept, rtol=rtol, what=f"{what}model_state")


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
