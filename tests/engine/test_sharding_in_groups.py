"""`jddp.FSDP(group_size=)`: groups of replicas, each of which divides all parameters."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from judge import Net, assert_close, host, make_rows, squares, start, wrapped
from models import GALLERY
from states import assert_same
from sweeps import swept
from test_fully_sharded import CASES, MODELS_OF_CASES, OPTIMIZERS, ROUNDED, both, whole_numbers
from tiny import MODELS, Of, loss_fn, make_batch, take_steps

import jddp
from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.engine.digest import as_words, digests, find_divergence
from jddp.engine.state import Divided
from jddp.ground.errors import ConfigError

FOUR, TWO = jddp.FSDP(group_size=4), jddp.FSDP(group_size=2)
EIGHT = {"mesh": 8, "reduction": jddp.Reduction(layout="flat")}


@pytest.mark.parametrize("name, size", swept([(c, s) for c in CASES for s in (4, 2)], every=4))
def test_other_options_are_those_of_replicated_parameters(name, size):
    options, (model, loss) = dict(CASES[name]), MODELS_OF_CASES.get(name, (Net(), squares))
    strategy = options.pop("strategy", jddp.FSDP())
    batches = [make_rows(seed=i) for i in range(4)]
    if options.get("skip_nonfinite"):
        batches[2]["x"][-1] = np.inf  # on one replica of the last group
    make = functools.partial(wrapped, model, loss, optimizer=OPTIMIZERS["adamw"], mesh=8, **options)
    strategy = dataclasses.replace(strategy, group_size=size)
    ddp, state = both(make, batches, rtol=ROUNDED.get(name, 1e-5), strategy=strategy)
    assert int(state.skipped) == bool(options.get("skip_nonfinite"))
    layouts = jax.tree.leaves(ddp.steps.layouts(state).params)
    assert {x.num for x in layouts if isinstance(x, Divided)} == {size}


@pytest.mark.parametrize("size, optimizer", swept([(2, "sgd"), (4, "adamw")], every=2))
def test_scanned_layers_are_those_of_replicated_parameters(size, optimizer):
    example = GALLERY["scanned_transformer"]
    make = functools.partial(
        *(jddp.DataParallel, example.model(), OPTIMIZERS[optimizer], example.loss_fn),
        mesh=8,
        **example.options,
    )
    batches = [example.make_batch(16, seed) for seed in range(3)]
    ddp, _ = both(make, batches, rtol=1e-5, strategy=jddp.FSDP(group_size=size))
    assert any(unit.num_slices == 3 for unit in ddp.plan.units)


def test_whole_numbers_are_bitwise_those_of_one_group_and_of_one_device():
    x = (np.arange(64.0).reshape(16, 4) % 5).astype(np.float32)
    batch, ends = {"x": x, "y": x.sum(1)}, []
    for mesh, strategy in ((1, "ddp"), (8, "fsdp"), (8, FOUR), (8, TWO)):
        ddp = wrapped(
            Of(whole_numbers),
            lambda m, b: m(b["x"]) - b["y"],
            optimizer=optax.sgd(1.0),
            mesh=mesh,
            strategy=strategy,
        )
        state, metrics = take_steps(ddp, [batch])
        ends.append(host((state.params, metrics)))
    for end in ends[1:]:
        jax.tree.map(np.testing.assert_array_equal, end, ends[0])


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


def test_a_group_of_all_replicas_is_the_program_of_none():
    texts = {
        wrapped(Net(), strategy=strategy).steps.lower(make_rows()).as_text()
        for strategy in ("fsdp", jddp.FSDP(), jddp.FSDP(group_size=4))
    }
    assert len(texts) == 1


@pytest.mark.parametrize("size", [4, 2])
def test_a_replica_keeps_its_part_of_what_its_group_has(size):
    def wide(m, x):
        return nn.Dense(8)(nn.relu(nn.Dense(1000)(x))).sum(1)

    strategy = jddp.FSDP(group_size=size)
    ddp = wrapped(Of(wide), optimizer=optax.adam(1e-3), ema_decay=0.9, strategy=strategy, **EIGHT)
    found = jddp.memory(ddp, make_rows())

    def hold(state):
        arrays = jax.tree.leaves((state.params, state.ema_params, state.opt_state))
        own = sum(x.addressable_shards[0].data.nbytes for x in arrays)
        assert own == found.parameters + found.optimizer
        whole = sum(x.nbytes for x in arrays)
        assert whole / size <= own <= whole / size + 4  # a count of steps
        # By the same names in each state, or the next step would be compiled again.
        shapes = ddp.steps.abstract_state(make_rows())
        want = jax.tree.leaves((shapes.params, shapes.ema_params, shapes.opt_state))
        assert [x.sharding for x in arrays] == [x.sharding for x in want]

    hold(ddp.init(0, make_rows()))
    hold(state := start(ddp, make_rows()))
    hold(ddp.step(state, make_rows())[0])


def test_evaluation_prediction_and_the_model_are_those_of_whole_parameters():
    batch, found, words = make_batch(), {}, set()
    for strategy in ("ddp", "fsdp", FOUR, TWO):
        ddp = wrapped(MODELS["mlp"](), loss_fn, ema_decay=0.9, strategy=strategy, **EIGHT)
        state = start(ddp, batch)
        found[str(strategy)] = host(
            (
                ddp.evaluate(state, [batch, make_batch(5, seed=1)]),
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


@pytest.mark.parametrize("dropout_rate", swept([0.2, 0.0], every=2))
def test_verify_holds_it_against_one_device_or_its_shares_side_by_side(dropout_rate):
    model, batch = MODELS["mlp"](dropout_rate=dropout_rate), make_batch()
    report = jddp.verify(model, optax.adam(1e-3), loss_fn, batch, strategy=FOUR)
    assert report.passed, str(report)
    assert report.is_side_by_side == (dropout_rate > 0)


WAYS = [(FOUR, 8), ("ddp", 2), (TWO, 8), ("zero1", 4), (FOUR, 8), ("fsdp", 8), (TWO, 4), (TWO, 8)]


@pytest.mark.slow
def test_a_checkpoint_resumes_by_any_strategy_and_in_other_groups(tmp_path):
    batch, optimizer = make_rows(), optax.adam(1e-2, eps=1e-3)

    def made(strategy, num):
        ddp = wrapped(Net(), optimizer=optimizer, mesh=num, strategy=strategy)
        return ddp, start(ddp, batch)

    alone, state = made("ddp", 1)
    for step, (strategy, num) in enumerate(WAYS):
        ddp, moving = made(strategy, num)
        checkpoints = CheckpointFolder(tmp_path, keep=2)
        if step:
            restored = checkpoints.restore(moving, ddp.steps.layouts(moving))
            assert restored.step == step
            shardings = [x.sharding for x in jax.tree.leaves(moving)]
            moving = restored.state
            assert [x.sharding for x in jax.tree.leaves(moving)] == shardings
        moving, _ = ddp.step(moving, batch)
        state, _ = alone.step(state, batch)
        checkpoints.save(step + 1, moving, {}, ddp.steps.layouts(moving))
        checkpoints.close()
        assert_close(host(moving.params), host(state.params), rtol=1e-5)


def test_a_resumed_run_is_bitwise_the_one_that_went_on(tmp_path):
    ddp = wrapped(Net(), optimizer=optax.adam(1e-2), strategy=FOUR, **EIGHT)
    state, _ = take_steps(ddp, [make_rows()], start(ddp, make_rows()))
    checkpoints = CheckpointFolder(tmp_path, keep=1)
    checkpoints.save(1, state, {}, ddp.steps.layouts(state))
    like = start(ddp, make_rows())
    restored = checkpoints.restore(like, ddp.steps.layouts(like)).state
    checkpoints.close()
    assert_same(restored, state)
    ends = [ddp.step(s, make_rows(seed=1))[0] for s in (state, restored)]
    assert_same(*ends)


def test_the_plan_and_the_explanation_tell_what_is_sent_between_groups():
    ddp = wrapped(Net(), strategy=FOUR, accumulate_steps=2, **EIGHT)
    start(ddp, make_rows())
    text, explained = str(ddp.plan), jddp.explain(ddp, make_rows())
    assert "fsdp: 2 groups of 4 replicas, each with all parameters\n" in text
    between = 2 / 2 * sum(4 * unit.bucket.size for unit in ddp.plan.units) / 4 / 2**20
    assert f"fsdp: between groups it sums {between:.3g} MiB of gradients, once\n" in text
    assert max(map(len, str(explained).splitlines())) <= 80
    assert re.search(r"all-to-all .* gradients, in loops\n", str(explained))
    assert re.search(r"all-reduce .* gradients, between groups\n", str(explained))
    found = explained.as_json()
    assert found["group_size"] == 4
    # Once for both micro-batches, in one bucket.
    (parts,) = [x for x in found["collectives"] if x["for"] == "gradients, between groups"]
    assert (parts["bytes"], parts["num_runs"]) == (between * 2**20, 1)
    assert parts["devices"] == [0, 4]
    assert "of gradients are averaged between groups\nof 4 devices." in str(explained)


@pytest.mark.parametrize("size", [1, 0, -2, 2.0, True, "four"])
def test_a_size_that_is_no_number_of_replicas_is_refused(size):
    with pytest.raises(ConfigError, match=rf"group_size is .* at least 2.*got {size!r}\. .*'ddp'"):
        jddp.FSDP(group_size=size)


@pytest.mark.parametrize("mesh, size, rule", [(4, 3, "[2, 4]"), (4, 8, "[2, 4]"), (1, 2, "None")])
def test_a_size_that_does_not_divide_the_replicas_is_refused_with_those_that_do(mesh, size, rule):
    message = rf"group_size={size} does not divide {mesh} replicas?\. Choose .*{re.escape(rule)}\."
    with pytest.raises(ConfigError, match=message):
        wrapped(Net(), mesh=mesh, strategy=jddp.FSDP(group_size=size))
