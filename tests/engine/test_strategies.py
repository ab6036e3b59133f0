"""Strategies that divide: what is kept, sent, planned, read, verified, explained and refused."""

import re

import jax
import jax.numpy as jnp
import judge
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import linen as nn
from judge import Either, Net, hold, host, in_both_places, make_rows, sent, squares, start, wrapped
from tiny import MODELS, Of, loss_fn, make_batch, take_steps

import jddp
from jddp.engine.digest import as_words, digests, find_divergence
from jddp.engine.initial_state import put_given
from jddp.engine.state import Divided, Inputs, Replicated, by_path
from jddp.ground.errors import ConfigError
from jddp.inspection.hlo import collectives, read_program
from jddp.modules.base import thaw
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
        judge.assert_close(found[strategy], found["ddp"], rtol=1e-6)


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


def of_one_branch(model, batch):
    """Two forward passes through the parameters of one branch, and none through the other."""
    if model.is_initializing():
        model.b(batch["x"])
    return (model.a(batch["x"]) - batch["y"]) ** 2 + model.a(2 * batch["x"])


@pytest.mark.parametrize("options", [{}, {"regather": False}, {"group_size": 2}], ids=str)
def test_several_forward_passes_and_an_unused_branch_are_those_of_one_device(options):
    more = {"mesh": 4, "strategy": jddp.FSDP(**options), "max_grad_norm": 0.1}
    ddp, state = hold(Either(), of_one_branch, [make_rows(seed=i) for i in range(3)], **more)
    assert {path[0] for path in ddp.plan.unused} == {"b"}
    layouts = jax.tree.leaves(ddp.steps.layouts(state).params)
    assert {x.num for x in layouts if isinstance(x, Divided)} == {options.get("group_size", 4)}


def odd(m, x):
    x = x * m.param("scalar", nn.initializers.ones, ())
    m.param("empty", nn.initializers.ones, (0, 8))
    x = nn.Dense(8)(nn.tanh(nn.Dense(15, name="odd")(x)))
    return nn.Dense(1)(x)[:, 0]


def test_what_does_not_divide_stays_whole_and_the_plan_says_so():
    options = {"mesh": 4, "max_grad_norm": 0.1, "strategy": "fsdp"}
    ddp, state = hold(Of(odd), squares, [make_rows(seed=i) for i in range(3)], **options)
    layouts = ddp.steps.layouts(state).params
    assert layouts["scalar"] == layouts["empty"] == Replicated() == layouts["odd"]["bias"]
    assert layouts["odd"]["kernel"] == Divided(0, 4)
    assert "whole, as 4 divides none of their dims: " in str(ddp.plan)
    assert "all-gathered twice and reduce-scattered once" in str(ddp.plan)


def test_what_travels_is_each_parameter_twice_and_each_gradient_once():
    def layers(m, x):
        for _ in range(3):
            x = nn.tanh(nn.Dense(8)(x))
        return x[:, 0]

    found = {}
    for regather in (True, False):
        ddp = wrapped(Of(layers), strategy=jddp.FSDP(regather=regather))
        lowered = ddp.steps.lower(make_rows())
        found[regather] = [
            lowered.as_text().count(f"stablehlo.{op}") for op in ("all_gather", "all_to_all")
        ]
        read = sent(ddp)
        divided = sum(x.size for x in jax.tree.leaves(ddp.steps.abstract_state(make_rows()).params))
        assert {x.num_passes for x in ddp.steps.planned(make_rows()).plan.units} == {1 + regather}
        # XLA:CPU drops the barrier that keeps the second gather apart from the first.
        assert sum(x.num_elements for x in read if x.op == "all-gather") == divided
        assert sum(x.num_elements for x in read if x.op == "all-to-all") == divided
    explained = str(jddp.explain(ddp, make_rows()))
    assert re.search(r"all-gather .* parameters, forward\n", explained)
    assert re.search(r"all-to-all .* gradients\n", explained)
    kept = jddp.explain(ddp, make_rows()).as_json()["memory"]["parameters"]
    assert kept * ddp.mesh.size == 4 * divided
    # Buckets of 80 bytes: a unit is one kernel and no more, or a bias; no bias is gathered again,
    # nor the first kernel, which the backward pass does not need.
    gathers, means = found[False]
    assert (gathers, means) == (6, 6)
    assert found[True] == [gathers + 2, means]
    # Mixed precision gathers half the bytes.
    ddp = wrapped(Of(layers), precision="bfloat16", strategy=jddp.FSDP(regather=False))
    op = r"stablehlo\.(all_gather|all_to_all).*?-> tensor<[\dx]*x(\w+)>"
    dtypes = {*re.findall(op, ddp.steps.lower(make_rows()).as_text(), re.S)}
    assert dtypes == {("all_gather", "bf16"), ("all_to_all", "f32")}


def test_given_parameters_are_whole_on_no_device(tmp_path, monkeypatch):
    device_put, parts = jax.device_put, []

    def recorded(x, sharding):
        parts.append((x.shape, sharding.shard_shape(x.shape)))
        return device_put(x, sharding)

    ddp = wrapped(Net(), strategy="fsdp", ema_decay=0.9, frozen=["first/bias"])
    values = Net().init(jax.random.key(0), make_rows()["x"])["params"]
    file = tmp_path / "weights.safetensors"
    safetensors.numpy.save_file({n: np.asarray(x) for n, x in by_path(values).items()}, file)
    monkeypatch.setattr(jax, "device_put", recorded)
    for given in (values, file):
        parts.clear()
        state = ddp.init(0, make_rows(), params=given)
        assert ((4, 4), (1, 4)) in parts
        assert ((4, 1), (1, 1)) in parts
        assert ((4,), (4,)) in parts  # frozen
        for tree in (state.params, state.ema_params):
            whole, _ = thaw(tree, state.model_state)
            jax.tree.map(np.testing.assert_array_equal, host(whole), host(values))
    # The program that makes a state of them gathers nothing.
    given = put_given(ddp.steps.spec, ddp.mesh, (values, {}))
    compiled = ddp.steps.init.lower(np.uint32(0), Inputs(None), *given).compile()
    assert not collectives(read_program(compiled.as_text()))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", TWO], ids=["ddp", "fsdp", "groups"])
def test_a_debugging_callback_is_called_once_for_each_replica(strategy):
    seen = []

    def body(m, x):
        w = m.param("w", nn.initializers.normal(), (4, 4))
        for shown in (x, w):
            jax.debug.callback(lambda x: seen.append(x.shape), shown)
        return (x @ w).sum(1)

    ddp = wrapped(Of(body), strategy=strategy, mesh=4)
    state = start(ddp, make_rows())
    jax.effects_barrier()
    seen.clear()
    jax.block_until_ready(ddp.step(state, make_rows()))
    jax.effects_barrier()
    assert len(seen) == 2 * 4


def test_one_device_is_ddp_which_is_said(caplog):
    ddp = wrapped(Net(), strategy="fsdp", mesh=1)
    assert "'fsdp' on one device is 'ddp'" in caplog.text
    take_steps(ddp, [make_rows()])


@pytest.mark.parametrize("size", [4, 2])
def test_parameters_are_sent_inside_of_groups_and_parts_of_gradients_between_them(size):
    options = {"reduction": jddp.Reduction(layout="flat", bucket_mb=25), "accumulate_steps": 2}
    ddp = wrapped(Net(), mesh=8, strategy=jddp.FSDP(group_size=size), **options)
    start(ddp, make_rows())
    explained = jddp.explain(ddp, make_rows())
    groups = f"fsdp: {8 // size} groups of {size} replicas, each with all parameters\n"
    assert groups in str(ddp.plan)
    assert re.search(r"all-to-all .* gradients, in loops\n", str(explained))
    assert re.search(r"all-reduce .* gradients, between groups\n", str(explained))
    found = explained.as_json()
    assert found["group_size"] == size
    # Once for both micro-batches, in one bucket.
    (parts,) = [x for x in found["collectives"] if x["for"] == "gradients, between groups"]
    num_bytes = sum(4 * unit.bucket.size for unit in ddp.plan.units) / size
    assert (parts["bytes"], parts["num_runs"]) == (num_bytes, 1)
    assert parts["devices"] == [*range(0, 8, size)]
    inside = {x["op"]: x["devices"] for x in found["collectives"] if x["op"] != "all-reduce"}
    assert inside == {op: [*range(size)] for op in ("all-gather", "all-to-all")}


def test_a_size_of_groups_that_cannot_be_is_refused_with_the_sizes_that_can():
    for size in (1, 0, -2, 2.0, True, "four"):
        with pytest.raises(ConfigError, match=f"group_size is .* at least 2.*got {size!r}"):
            jddp.FSDP(group_size=size)
    for mesh, size, rule in ((4, 3, "[2, 4]"), (4, 8, "[2, 4]"), (1, 2, "None")):
        with pytest.raises(ConfigError, match=f"group_size={size} .*{re.escape(rule)}"):
            wrapped(Net(), mesh=mesh, strategy=jddp.FSDP(group_size=size))
