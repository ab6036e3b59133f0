"""What replicas have of each other and for themselves; state that depends on the rows."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import linen as nn
from flax import nnx
from jax import lax
from judge import host
from states import close, equal
from sweeps import swept
from tiny import MLP, NUM_CLASSES, Of, make_batch, take_steps

import jddp
from jddp.engine.digest import digests, find_divergence
from jddp.engine.state import PerReplica, merged
from jddp.ground.errors import ConfigError

wrapped = functools.partial(tiny.wrapped, mesh=None)


def towers(m, x, y):
    """Two networks whose outputs should agree for the same row, and for no other."""
    both = (nn.Dense(8, name="x")(x), nn.Dense(8, name="y")(y))
    return [v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in both]


def contrastive(model, batch, gather, first_row):
    x, y = model(batch["x"], batch["y"])
    logits = 5 * x @ gather(y).T
    labels = first_row(len(x)) + jnp.arange(len(x))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def test_a_contrastive_loss_over_all_rows_has_the_gradient_of_one_device(mesh):
    x = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
    batch, model = {"x": x, "y": x[:, ::-1] + 0.1}, Of(towers)
    rows = {"gather": jddp.all_gather, "first_row": lambda n: n * lax.axis_index(jddp.AXIS)}
    ddp = wrapped(model, loss=functools.partial(contrastive, **rows), mesh=mesh)
    state = ddp.init(0, batch)

    def alone(variables):
        return contrastive(model.bind(variables), batch, lambda y: y, lambda n: 0).mean()

    loss, want = jax.value_and_grad(alone)(ddp.model(state))
    grads, metrics = ddp.gradients(state, batch)
    close((metrics["loss"], {"params": grads}), (loss, want))


def test_a_replica_s_key_follows_the_rule_of_all_random_numbers(mesh):
    ddp = wrapped(mesh=mesh)
    batch = make_batch()
    state, _ = ddp.step(ddp.init(3, batch), batch)
    keys = jddp.replica_key(state, "environment")
    assert keys.shape == (mesh.size,)
    assert len(keys.addressable_shards) == mesh.size
    for i in range(mesh.size):
        words = (1, i, zlib.crc32(b"environment"))
        want = functools.reduce(jax.random.fold_in, words, jax.random.key(3))
        assert jax.random.key_data(keys[i]).tolist() == jax.random.key_data(want).tolist()


def wander(m, x, train):
    own = m.variable("own", "w", jnp.zeros, (x.shape[-1], 4))
    calls = m.variable("own", "calls", jnp.zeros, (), jnp.int32)
    if train and not m.is_initializing():
        own.value += jax.random.normal(m.make_rng("noise"), own.value.shape)
        calls.value += 1
    return MLP()(x, train) + x @ own.value


Own, Count = (type(name, (nnx.Variable,), {}) for name in ("Own", "Count"))


class NnxWander(nnx.Module):
    def __init__(self):
        self.rngs = nnx.Rngs(0)
        self.dense, self.own = nnx.Linear(16, 4, rngs=self.rngs), Own(jnp.zeros((16, 4)))

    def __call__(self, x, train):
        if train:
            self.own[...] += self.rngs.noise.normal((16, 4))
        return self.dense(x) + x @ self.own[...]


WANDERERS = {"linen": (lambda: Of(wander), "own"), "nnx": (NnxWander, "Own")}
in_both = pytest.mark.parametrize("make, kind", WANDERERS.values(), ids=WANDERERS)


def own_of(model_state):
    return model_state["own"]["w"] if "own" in model_state else model_state["rest"]["own"]


@in_both
def test_what_is_declared_per_replica_differs_and_no_digest_minds(make, kind):
    batch, ddp = make_batch(), wrapped(make(), state={kind: "per_replica"})
    state, _ = take_steps(ddp, [batch] * 2)
    rows = host(own_of(state.model_state))
    assert rows.shape == (8, 16, 4)
    assert len({row.tobytes() for row in rows}) == 8
    assert find_divergence(digests(state), state) is None
    for leaf in jax.tree.leaves(state.params):
        assert len({np.asarray(x.data).tobytes() for x in leaf.addressable_shards}) == 1
    read = ddp.model(state)
    mean = read.own[...] if kind == "Own" else read["own"]["w"]
    np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-5, atol=1e-6)
    assert ddp.evaluate(state, [batch])["examples"] == 16


def test_a_replica_without_valid_rows_keeps_its_state_and_counts_the_step():
    make, kind = WANDERERS["linen"]
    batch = make_batch() | {"mask": np.float32(np.arange(16) < 2)}  # the rows of replica 0
    state, _ = take_steps(wrapped(make(), state={kind: "per_replica"}, batch_norm="local"), [batch])
    own = host(state.model_state["own"])
    assert [bool(row.any()) for row in own["w"]] == [True, *[False] * 7]
    assert own["calls"].tolist() == [1] * 8


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32])
@pytest.mark.parametrize("place", [np.asarray, jnp.asarray])
def test_the_mean_of_whole_numbers_is_rounded_down_and_fits_where_they_do(dtype, place):
    top = np.iinfo(dtype).max
    rows = place(np.array([[top, 4, 0], [top, 5, 0], [top - 1, 4, 1], [top, 4, 0]], dtype))
    read = merged(rows, PerReplica())
    np.testing.assert_array_equal(read, [top - 1, 4, 0])
    assert read.dtype == dtype


@pytest.mark.parametrize("make, kind", swept(WANDERERS, every=2))
def test_a_run_goes_on_with_what_each_replica_had(make, kind, tmp_path):
    def fit(num_steps, run_dir):
        ddp, options = wrapped(make(), state={kind: "per_replica"}), {"num_steps": num_steps}
        run = jddp.fit(ddp, [make_batch()] * 4, run_dir=tmp_path / run_dir, **options)
        return host(own_of(run.state.model_state))

    fit(2, "twice")
    np.testing.assert_array_equal(fit(4, "twice"), fit(4, "once"))


@in_both
def test_what_is_drawn_and_not_declared_is_refused_and_a_declared_mean_is_one_for_all(make, kind):
    with pytest.raises(ConfigError, match=f"random numbers of each replica.*{kind}"):
        take_steps(wrapped(make()), [make_batch()])
    state, _ = take_steps(wrapped(make(), state={kind: "mean"}), [make_batch()])
    leaf = own_of(state.model_state)
    assert leaf.shape == (16, 4)
    assert len({np.asarray(x.data).tobytes() for x in leaf.addressable_shards}) == 1
    with pytest.raises(ConfigError, match=f"'owned', and the model keeps .*{kind}"):
        wrapped(make(), state={"owned": "per_replica"}).init(0, make_batch())


def signs_of(x):
    return jnp.bincount((x[:, 0] > 0) + 2 * (x[:, 1] > 0), length=NUM_CLASSES)


def count(m, x, train):
    seen = m.variable("counts", "seen", jnp.zeros, (NUM_CLASSES,), jnp.int32)
    calls = m.variable("counts", "calls", jnp.zeros, (), jnp.int32)
    if train and not m.is_initializing():
        seen.value += signs_of(x)
        calls.value += 1
    return MLP()(x, train)


class NnxCounts(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(16, NUM_CLASSES, rngs=nnx.Rngs(0))
        self.seen = Count(jnp.zeros((NUM_CLASSES,), jnp.int32))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x, train):
        if train:
            self.seen[...] += signs_of(x)
            self.calls[...] += 1
        return self.dense(x)


COUNTERS = {"linen": (lambda: Of(count), "counts"), "nnx": (NnxCounts, "Count")}
in_counters = pytest.mark.parametrize("make, kind", COUNTERS.values(), ids=COUNTERS)


def counted(state):
    kept = state.model_state.get("counts") or state.model_state["rest"]
    return jax.device_get((kept["seen"], kept["calls"]))


def train(model, num_steps=3, **options):
    ddp = wrapped(model, **options)
    state, _ = take_steps(ddp, [make_batch(32, seed=seed) for seed in range(num_steps)])
    return ddp, state


@pytest.mark.parametrize(
    "name, mode", [("linen", "sync"), ("linen", "broadcast"), ("nnx", "local")]
)
def test_counts_of_rows_that_are_not_declared_are_refused_by_name(name, mode):
    make, kind = COUNTERS[name]
    with pytest.raises(jddp.ConfigError, match=f"seen' depends on the rows.*'{kind}': 'sum'") as e:
        train(make(), 1, batch_norm=mode)
    assert "\n" not in str(e.value)
    assert "calls" not in str(e.value)


@in_counters
def test_a_sum_over_replicas_is_the_count_of_one_device(make, kind):
    """Calls count micro-batches, and are no sum. All options are in test_random_options."""
    options = {"strategy": jddp.LogicalReplicas(8), "mesh": 2, "accumulate_steps": 2}
    ddp, state = train(make(), state={kind: "sum"}, **options)
    equal(counted(state), counted(train(make(), mesh=1, accumulate_steps=2)[1]))
    assert find_divergence(digests(state), state) is None
    assert ddp.evaluate(state, [make_batch(32)])["examples"] == 32


@in_counters
def test_the_first_is_replica_zero_s_and_the_same_everywhere(make, kind):
    _, state = train(make(), 1, state={kind: "first"})
    equal(counted(state)[0], signs_of(make_batch(32, seed=0)["x"][:4]))
    assert find_divergence(digests(state), state) is None


def test_names_and_rules_that_are_not_known_are_refused():
    of_ints = "'mean' does not fit '.*seen' of int32"
    for model, state, message in (
        (Of(count), {"count": "sum"}, "names 'count', and .* counts"),
        (Of(count), {"counts": "max"}, "'max'}: .*'mean', 'sum', 'first'"),
        (Of(count), {"counts": "mean"}, of_ints),
        (NnxCounts(), {"Count": "mean"}, of_ints),
    ):
        with pytest.raises(jddp.ConfigError, match=message):
            train(model, 1, state=state)


def written(functions):
    """A model that keeps the values of functions of itself, its rows and the values before."""

    def body(m, x, train):
        y = MLP(name="mlp")(x, train)
        for name, function in functions.items():
            kept = m.variable("kept", name, jnp.zeros, ())
            if train and not m.is_initializing():
                kept.value = function(m, x, kept.value)
        return y

    return Of(body)


def mean(x):
    return lax.pmean(x, "data")


def looped(collective):
    """A running value in a scan, over rows that `collective` has seen."""

    @jax.checkpoint
    def add(carry, row):
        return carry + collective(row.sum()), None

    return lambda module, x, value: lax.scan(add, value, x)[0]


EQUAL = {
    "a count of steps": lambda m, x, v: v + 1,
    "parameters": lambda m, x, v: m.variables["params"]["mlp"]["Dense_0"]["kernel"].sum(),
    "a sum of all rows": lambda m, x, v: lax.psum(x.sum(), "data"),
    "all rows": lambda m, x, v: jax.nn.relu(lax.all_gather(x, "data")).mean(),
    "a loop over sums": looped(mean),
    "a choice by what is equal": lambda m, x, v: lax.cond(v > 0, lambda: v, lambda: mean(x.max())),
    "a loop that all leave at once": lambda m, x, v: lax.while_loop(
        lambda c: c < 3, lambda c: c + 1 + 0 * mean(x.sum()), v
    ),
}
APART = {
    "rows": lambda m, x, v: x.sum(),
    "a random number": lambda m, x, v: jax.random.normal(m.make_rng("dropout"), ()),
    "the replica": lambda m, x, v: 1.0 * lax.axis_index("data"),
    "the value of a neighbour": lambda m, x, v: lax.ppermute(v, "data", [(0, 1)]),
    "a loop over rows": looped(lambda row: row),
    "what a loop carries round": lambda m, x, v: lax.fori_loop(
        0, 3, lambda i, c: (c[1], c[2], c[2]), (v, v, x.sum())
    )[0],
    "a choice by rows": lambda m, x, v: lax.cond(x.sum() > 0, lambda: v, lambda: v + 1),
    "a loop left when rows say so": lambda m, x, v: lax.while_loop(
        lambda c: c < x.sum(), lambda c: c + 1, v
    ),
    "a sum with rows": lambda m, x, v: mean(x.sum()) + 0 * x[0, 0],
    "groups of replicas": lambda m, x, v: lax.pmax(x.sum(), "data", axis_index_groups=[[0], [1]]),
}


@pytest.mark.parametrize("functions, options", [(EQUAL, {}), (APART, {"kept": "first"})])
def test_state_that_is_the_same_on_all_replicas_needs_no_rule(functions, options):
    """What is not is the same once it has a rule."""
    _, state = train(written(functions), 1, mesh=2, state=options)
    assert find_divergence(digests(state), state) is None


@pytest.mark.parametrize("name", swept([*APART], every=3))
def test_state_that_is_not_needs_one(name):
    with pytest.raises(jddp.ConfigError, match=f"'kept/{name}' depends on the rows or random"):
        train(written({name: APART[name]}), 1, mesh=2)
