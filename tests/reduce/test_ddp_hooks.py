"""PyTorch DDP's cases of communication hooks (HK)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from judge import PLACES, Net, Plane, host, in_both_places, joined, make_rows, sent, start, wrapped
from states import equal
from sweeps import swept
from tiny import take_steps

import jddp
from jddp.ground.errors import ConfigError


def stateless(reduce):
    """A hook of `reduce(bucket, axis)`."""
    return reducing(lambda bucket, comm_state, axis: (reduce(bucket, axis), comm_state))


def reducing(reduce, initial=()):
    return jddp.CommHook(lambda plan: initial, reduce)


def scaled(bucket, factor):
    return jax.tree.map(lambda x: factor * x, bucket)


def step(model, *, num_steps=1, **options):
    ddp = wrapped(model, **{"optimizer": optax.sgd(1.0), **options})
    return ddp, take_steps(ddp, [make_rows()] * num_steps, start(ddp, make_rows()))[0]


MEAN = stateless(lax.pmean)
DIVIDED_BEFORE = stateless(lambda b, axis: lax.psum(scaled(b, 1 / 4), axis))
HOOKS = {
    # The same arithmetic: the same bits.
    "mean": ({"reduction": jddp.Reduction(hook=MEAN)}, 0),
    "sum, divided before": ({"reduction": jddp.Reduction(hook=DIVIDED_BEFORE)}, 0),
    # Replicas are four, and eight bits a number: 4 * 2^-8. Eleven bits: 4 * 2^-11.
    "bfloat16": ({"reduction": "bfloat16"}, 2**-6),
    "float16": ({"reduction": "float16"}, 2**-9),
    "bfloat16 around a hook": (
        {"reduction": jddp.Reduction(wire_dtype="bfloat16", hook=MEAN)},
        2**-6,
    ),
}


@in_both_places
def test_parameters_are_those_without_a_hook(place):
    want = host(step(Net(), **place)[1].params)
    for name, (options, rtol) in HOOKS.items():
        got = host(step(Net(), **joined(options, place))[1].params)
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max(), err_msg=name)


@in_both_places
def test_a_hook_that_does_nothing_sends_nothing(place):
    """HK-1, noop: what then travels is the loss; each replica goes its own way."""
    ddp, state = step(
        Net(),
        **joined(place, reduction=jddp.Reduction(hook=stateless(lambda bucket, axis: bucket))),
    )
    assert [x.num_elements for x in sent(ddp)] == [2]
    first, second, *_ = state.params["first"]["kernel"].addressable_shards
    assert not np.array_equal(first.data, second.data)


def ranks(model, batch):
    return model(batch["rank"])


RANKS = {"rank": np.arange(4, dtype=np.float32)}


def assert_moves_by(gradient, *, shape=(2, 2), num_steps=100, rtol=0, **options):
    """Each of the steps moves all weights by the gradient, whose rate is 1."""
    ddp = wrapped(Plane(shape), ranks, optimizer=optax.sgd(1.0), **options)
    state = ddp.init(0, RANKS)
    for i in range(1, num_steps + 1):
        state, _ = ddp.step(state, RANKS)
        np.testing.assert_allclose(state.params["w"], np.full(shape, -gradient * i), rtol=rtol)


TEN_TIMES_HALF = stateless(lambda b, axis: scaled(scaled(lax.pmean(b, axis), 10), 0.5))
OF_ITS_OWN = stateless(lambda b, axis: jax.tree.map(lambda x: jnp.full_like(x, 2), b))


@in_both_places
@pytest.mark.parametrize(
    "hook, gradient",
    [(MEAN, 1.5), (TEN_TIMES_HALF, 7.5), (OF_ITS_OWN, 2.0)],
    ids=["mean", "HK-3, ten times and by two", "HK-4, of its own"],
)
def test_what_a_hook_returns_is_the_gradient(hook, gradient, place):
    assert_moves_by(gradient, num_steps=1, **joined(place, reduction=jddp.Reduction(hook=hook)))


@in_both_places
@pytest.mark.parametrize("wire_dtype", [None, "float16"])
def test_the_mean_is_the_same_in_each_of_a_hundred_steps(place, wire_dtype):
    assert_moves_by(1.5, **joined(place, reduction=jddp.Reduction(wire_dtype=wire_dtype)))


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("warm", swept([True, False], every=2))
@pytest.mark.parametrize("rank, place", swept([(1, "leaf-end"), (2, "flat-ready")], every=2))
def test_before_it_begins_powersgd_is_no_hook(feedback, warm, rank, place):
    """HK-2: three steps before the start, one behind it."""
    options = {"error_feedback": feedback, "warm_start": warm, "rank": rank}
    hook = jddp.powersgd(start_step=3, min_compression_rate=0.1, **options)
    ends = [
        wrapped(Net(), **joined(PLACES[place], reduction=jddp.Reduction(hook=x)))
        for x in (hook, None)
    ]
    states = [start(ddp, make_rows()) for ddp in ends]
    for i in range(4):
        states = [ddp.step(s, make_rows(seed=i))[0] for ddp, s in zip(ends, states, strict=True)]
        got, want = (host(state.params) for state in states)
        if i < 3:
            equal(got, want)
    # Biases always travel exactly; a kernel of one column is of rank 1.
    assert not np.array_equal(got["first"]["kernel"], want["first"]["kernel"])


def test_what_is_no_hook_is_refused_when_it_is_given():
    for hook in ("bfloat16", lax.pmean, (len, len), jddp.CommHook, jddp.CommHook(len, "mean")):
        with pytest.raises(ConfigError, match="hook is .* Give a jddp.CommHook"):
            wrapped(Net(), reduction=jddp.Reduction(hook=hook))


def remembering(initial, new):
    return reducing(lambda bucket, memory, axis: (lax.pmean(bucket, axis), new), initial)


def averaging(change):
    return stateless(lambda b, axis: jax.tree.map(change, lax.pmean(b, axis)))


WRONG = {
    "returns a bucket alone": reducing(lambda bucket, s, axis: lax.pmean(bucket, axis)),
    "returns nothing": reducing(lambda bucket, s, axis: None),
    "returns arrays": stateless(lambda bucket, axis: lax.pmean(bucket.values, axis)),
    "returns another shape": averaging(lambda x: x.ravel()[:-1]),
    "returns another dtype": averaging(lambda x: x.astype(jnp.bfloat16)),
    "remembers another structure": remembering((), {"calls": np.zeros(2)}),
    "remembers another shape": remembering(np.zeros(2), jnp.zeros(3)),
    "remembers another dtype": remembering(np.zeros(2), jnp.zeros(2, jnp.int32)),
}
COMES = {"returns another dtype": r".*of bfloat16\[.*that it is given: .* of float32\["}


@pytest.mark.parametrize("name", WRONG)
def test_a_hook_that_breaks_its_contract_is_refused_with_the_reason(name):
    """While the step is traced: before anything is compiled or sent."""
    with pytest.raises(ConfigError, match="hook" + COMES.get(name, "")):
        wrapped(Net(), reduction=jddp.Reduction(hook=WRONG[name])).steps.lower(make_rows())
