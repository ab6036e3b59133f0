"""What holds of each strategy that divides: what replicas keep, read, verify and resume."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from judge import Net, assert_close, host, in_both_places, make_rows, sent, start, wrapped
from sweeps import swept
from tiny import MODELS, Of, loss_fn, make_batch

import jddp
from jddp.engine.digest import as_words, digests, find_divergence
from jddp.reduce.shards import shard_shape

FOUR, TWO = jddp.FSDP(group_size=4), jddp.FSDP(group_size=2)
STRATEGIES = ["zero1", "fsdp", FOUR, TWO]
EIGHT = {"mesh": 8, "reduction": jddp.Reduction(layout="flat")}


def bytes_of_a_replica(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("strategy, num_parts", [("zero1", 8), ("fsdp", 8), (FOUR, 4), (TWO, 2)])
def test_a_replica_keeps_its_part_of_parameters_average_and_optimizer(strategy, num_parts):
    def wide(m, x):
        scale = m.param("scale", nn.initializers.ones, ())
        return nn.Dense(8)(nn.relu(nn.Dense(1000)(x))).sum(1) * scale

    options = {"optimizer": optax.adam(1e-3), "ema_decay": 0.9, **EIGHT}
    ddp = wrapped(Of(wide), strategy=strategy, **options)
    found = jddp.memory(ddp, make_rows())

    def hold(state):
        parameters, optimizer = (state.params, state.ema_params), state.opt_state
        assert found.parameters == bytes_of_a_replica(parameters)
        assert found.optimizer == bytes_of_a_replica(optimizer)
        divided = optimizer if strategy == "zero1" else (*parameters, optimizer)
        whole = sum(x.nbytes for x in jax.tree.leaves(divided))
        assert bytes_of_a_replica(divided) <= whole / num_parts + 64  # numbers, and padding
        # By the same names in each state, or the next step would be compiled again.
        shapes = ddp.steps.abstract_state(make_rows())
        for got, want in ((state.params, shapes.params), (state.opt_state, shapes.opt_state)):
            jax.tree.map(lambda x, y: x.sharding == y.sharding or 1 / 0, got, want)

    hold(ddp.init(0, make_rows()))
    hold(state := start(ddp, make_rows()))
    hold(ddp.step(state, make_rows())[0])


def test_evaluation_prediction_gradients_and_the_model_are_those_of_whole_parameters():
    batch, found, words = make_batch(masked=True), {}, set()
    for strategy in ("ddp", *STRATEGIES):
        ddp = wrapped(MODELS["mlp"](), loss_fn, ema_decay=0.9, strategy=strategy, **EIGHT)
        state = start(ddp, batch)
        found[str(strategy)] = host(
            (
                ddp.evaluate(state, [batch, make_batch(5, seed=1, masked=True)]),
                ddp.evaluate(state, [batch], params="ema"),
                ddp.predict(state, [batch], lambda m, b: m(b["x"], train=False)),
                ddp.model(state),
                ddp.gradients(state, batch),
                jddp.diagnose(ddp, state, batch),
            )
        )
        words.add(tuple(as_words(digests(state.params), state.params)))
    assert len(words) == 1
    for strategy in found:
        assert_close(found[strategy], found["ddp"], rtol=1e-6)


VERIFIED = [(x, rate) for x in (*STRATEGIES, jddp.LogicalReplicas(8)) for rate in (0.0, 0.2)]


@pytest.mark.parametrize("strategy, dropout_rate", swept(VERIFIED, every=3))
def test_verify_holds_it_against_one_device_or_its_replicas_side_by_side(strategy, dropout_rate):
    model, batch = MODELS["mlp"](dropout_rate=dropout_rate), make_batch()
    report = jddp.verify(model, optax.adam(1e-3), loss_fn, batch, strategy=strategy)
    assert report.passed, str(report)
    if strategy in STRATEGIES:
        assert report.is_side_by_side == (dropout_rate > 0)
    else:
        assert all(comparison.error == 0 for comparison in report.comparisons), str(report)


def test_a_group_whose_copy_differs_is_found():
    ddp = wrapped(Net(), strategy=FOUR, **EIGHT)
    state = start(ddp, make_rows())
    assert find_divergence(digests(state), state) is None
    x = state.params["first"]["kernel"]
    parts = [shard.data for shard in x.addressable_shards]
    parts[6] = jnp.nextafter(parts[6], jnp.inf)
    state.params["first"]["kernel"] = jax.make_array_from_single_device_arrays(
        x.shape, x.sharding, parts
    )
    found = find_divergence(digests(state), state)
    assert found == "params/first/kernel differs on replica 6 (process 0)"


@in_both_places
def test_zero1_sends_each_gradient_out_and_each_parameter_back(place):
    ddp = wrapped(Net(), strategy="zero1", **place)
    state, found = start(ddp, make_rows()), sent(ddp)
    sizes = {op: [x.num_elements for x in found if x.op == op] for op in {x.op for x in found}}
    padded = sum(4 * shard_shape(x.shape, 4)[0] for x in jax.tree.leaves(state.params))
    # CPUs send the rows of a bucket to whom they belong and add them there: as many bytes.
    assert sum(sizes["all-to-all"]) == sum(sizes["all-gather"]) == padded
    assert sizes["all-reduce"] == [2]  # The loss and the count.
    if place["reduction"].layout == "flat":
        assert len(sizes["all-to-all"]) == len(sizes["all-gather"]) == len(ddp.plan)
    clipped = wrapped(Net(), strategy="zero1", max_grad_norm=1.0, **place)
    assert sorted(x.num_elements for x in sent(clipped) if x.op == "all-reduce") == [1, 2]
    rows = str(jddp.explain(ddp, make_rows())).splitlines()
    purposes = {tuple(row.split()[3:4] + row.split()[5:]) for row in rows if " f32 " in row}
    assert {("all-to-all", "gradients"), ("all-gather", "parameters,", "updated")} <= purposes
