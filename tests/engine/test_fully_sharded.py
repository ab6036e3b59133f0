"""`strategy="fsdp"`, also in groups: what is divided, sent, planned, explained and refused."""

import re

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import linen as nn
from judge import Either, Net, hold, host, make_rows, sent, squares, start, wrapped
from tiny import Of, take_steps

import jddp
from jddp.engine.initial_state import put_given
from jddp.engine.state import Divided, Inputs, Replicated, by_path
from jddp.ground.errors import ConfigError
from jddp.inspection.collectives import collectives
from jddp.inspection.hlo import read_program
from jddp.modules.base import thaw


def of_one_branch(model, batch):
    """Two forward passes through the parameters of one branch, and none through the other."""
    if model.is_initializing():
        model.b(batch["x"])
    return (model.a(batch["x"]) - batch["y"]) ** 2 + model.a(2 * batch["x"])


@pytest.mark.parametrize("options", [{}, {"regather": False}, {"group_size": 2}], ids=str)
def test_several_forward_passes_and_an_unused_branch_are_those_of_one_device(options):
    batches = [make_rows(seed=i) for i in range(3)]
    more = {"mesh": 4, "strategy": jddp.FSDP(**options), "max_grad_norm": 0.1}
    ddp, state = hold(Either(), of_one_branch, batches, **more)
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
        units = ddp.steps.planned(make_rows()).plan.units
        assert {x.num_passes for x in units} == {1 + regather}
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


GROUPS = jddp.FSDP(group_size=2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", GROUPS], ids=["ddp", "fsdp", "groups"])
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


def groups_of(text, op):
    """The groups of devices of each collective of a kind in a compiled program."""
    pattern = rf" {op}\(.*?replica_groups=\{{(\{{[^ ]*?\}})\}}"
    return [found.strip("{}").split("},{") for found in re.findall(pattern, text)]


@pytest.mark.parametrize("size", [4, 2])
def test_parameters_are_sent_inside_of_groups_and_parts_of_gradients_between_them(size):
    # Of 16 bytes: a unit is a kernel or a bias, and so is a bucket of parts.
    reduction = jddp.Reduction(layout="flat", bucket_mb=16 / 2**20)
    ddp = wrapped(Net(), mesh=8, reduction=reduction, strategy=jddp.FSDP(group_size=size))
    batch = make_rows()
    text = ddp.steps.lower(batch).compile().as_text()
    num_units, devices = len(ddp.steps.planned(batch).plan.units), np.arange(8)
    assert num_units == 3
    members, peers = (
        [",".join(map(str, row)) for row in rows]
        for rows in (devices.reshape(-1, size), devices.reshape(-1, size).T)
    )
    assert groups_of(text, "all-gather") == [members] * num_units
    assert groups_of(text, "all-to-all") == [members] * num_units
    sums = groups_of(text, "all-reduce")
    assert sums.count(peers) == num_units
    assert all(len(groups) == 1 for groups in sums if groups != peers)  # metrics


def test_the_plan_and_the_explanation_tell_what_is_sent_between_groups():
    options = {"mesh": 8, "reduction": jddp.Reduction(layout="flat"), "accumulate_steps": 2}
    ddp = wrapped(Net(), strategy=jddp.FSDP(group_size=4), **options)
    start(ddp, make_rows())
    text, explained = str(ddp.plan), jddp.explain(ddp, make_rows())
    assert "fsdp: 2 groups of 4 replicas, each with all parameters\n" in text
    between = 2 / 2 * sum(4 * unit.bucket.size for unit in ddp.plan.units) / 4 / 2**20
    assert re.search(r"all-to-all .* gradients, in loops\n", str(explained))
    assert re.search(r"all-reduce .* gradients, between groups\n", str(explained))
    found = explained.as_json()
    assert found["group_size"] == 4
    # Once for both micro-batches, in one bucket.
    (parts,) = [x for x in found["collectives"] if x["for"] == "gradients, between groups"]
    assert (parts["bytes"], parts["num_runs"]) == (between * 2**20, 1)
    assert parts["devices"] == [0, 4]


@pytest.mark.parametrize("size", [1, 0, -2, 2.0, True, "four"])
def test_a_size_that_is_no_number_of_replicas_is_refused(size):
    with pytest.raises(ConfigError, match=rf"group_size is .* at least 2.*got {size!r}\. .*'ddp'"):
        jddp.FSDP(group_size=size)


@pytest.mark.parametrize("mesh, size, rule", [(4, 3, "[2, 4]"), (4, 8, "[2, 4]"), (1, 2, "None")])
def test_a_size_that_does_not_divide_the_replicas_is_refused_with_those_that_do(mesh, size, rule):
    message = rf"group_size={size} does not divide {mesh} replicas?\. Choose .*{re.escape(rule)}\."
    with pytest.raises(ConfigError, match=message):
        wrapped(Net(), mesh=mesh, strategy=jddp.FSDP(group_size=size))
