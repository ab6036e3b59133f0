"""State beside the parameters that depends on the rows: refused, or combined as declared.

The judge is one device that is given the whole batch.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from states import equal
from sweeps import swept
from tiny import MLP, NUM_CLASSES, Of, loss_fn, make_batch, take_steps

import jddp
from jddp.engine.digest import digests, find_divergence


def signs_of(x):
    return jnp.bincount((x[:, 0] > 0) + 2 * (x[:, 1] > 0), length=NUM_CLASSES)


class Counts(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        seen = self.variable("counts", "seen", jnp.zeros, (NUM_CLASSES,), jnp.int32)
        calls = self.variable("counts", "calls", jnp.zeros, (), jnp.int32)
        if train and not self.is_initializing():
            seen.value += signs_of(x)
            calls.value += 1
        return MLP()(x, train)


class Count(nnx.Variable):
    pass


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


COUNTERS = {"linen": (Counts, "counts"), "nnx": (NnxCounts, "Count")}
in_both = pytest.mark.parametrize("make, kind", COUNTERS.values(), ids=COUNTERS)


def counted(state):
    kept = state.model_state.get("counts") or state.model_state["rest"]
    return jax.device_get((kept["seen"], kept["calls"]))


def train(model, num_steps=3, **options):
    ddp = jddp.DataParallel(model, optax.sgd(0.1), loss_fn, **options)
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


@pytest.mark.parametrize(
    "name, options",
    swept(
        [
            ("linen", {}),
            ("linen", {"accumulate_steps": 2, "reduction": jddp.Reduction(overlap=True)}),
            ("nnx", {"strategy": jddp.LogicalReplicas(8), "mesh": 2, "accumulate_steps": 2}),
        ],
        every=2,
    ),
    ids=["plain", "overlap", "nnx on logical replicas"],
)
def test_a_sum_over_replicas_is_the_count_of_one_device(name, options):
    """Calls count micro-batches, and are no sum. All options are in test_option_pairs."""
    make, kind = COUNTERS[name]
    ddp, state = train(make(), state={kind: "sum"}, **options)
    parts = {"accumulate_steps": options.get("accumulate_steps", 1)}
    equal(counted(state), counted(train(make(), mesh=1, **parts)[1]))
    assert find_divergence(digests(state), state) is None
    assert ddp.evaluate(state, [make_batch(32)])["examples"] == 32


@in_both
def test_the_first_is_replica_zero_s_and_the_same_everywhere(make, kind):
    _, state = train(make(), 1, state={kind: "first"})
    equal(counted(state)[0], signs_of(make_batch(32, seed=0)["x"][:4]))
    assert find_divergence(digests(state), state) is None


def test_names_and_rules_that_are_not_known_are_refused():
    of_ints = "'mean' does not fit '.*seen' of int32"
    for make, options, message in (
        (Counts, {"state": {"count": "sum"}}, "names 'count', and .* counts"),
        (Counts, {"state": {"counts": "max"}}, "'max'}: .*'mean', 'sum', 'first'"),
        (Counts, {"state": {"counts": "mean"}}, of_ints),
        (NnxCounts, {"state": {"Count": "mean"}}, of_ints),
    ):
        with pytest.raises(jddp.ConfigError, match=message):
            train(make(), 1, **options)


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
