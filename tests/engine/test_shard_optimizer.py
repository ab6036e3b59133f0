"""Each replica updates its part of every parameter: the same numbers, a part of the memory."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from judge import Net, assert_close, host, in_both_places, make_rows, sent, start, wrapped
from sweeps import swept
from tiny import MODELS, Of, loss_fn, make_batch, take_steps

import jddp
from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.ground.errors import ConfigError
from jddp.reduce.shards import pack, shard_shape, unpack
from jddp.zoo.optimizers import decay_mask

# Adam and its kin divide by roots of what is small: rounding of a gradient is all of it.
ROUNDING = 1e-5

OPTIMIZERS = {
    "adamw with a mask": optax.adamw(1e-2, weight_decay=0.1, mask=decay_mask),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "lion": optax.lion(1e-3),
    "a schedule": optax.adam(optax.cosine_decay_schedule(1e-2, 4)),
    "schedule free": optax.contrib.schedule_free_adamw(1e-2),
    "two in one": optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.set_to_zero()},
        lambda params: jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", params),
    ),
    "hyperparameters in the state": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "a plateau": optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1)),
    "prodigy": optax.contrib.prodigy(1e-3),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "steps of muon": optax.MultiSteps(optax.contrib.muon(0.1), 2),
}


@pytest.mark.parametrize("name", swept([*OPTIMIZERS], every=3))
def test_parameters_are_those_of_the_whole_update(name):
    ends = []
    for sharded in (True, False):
        ddp = wrapped(
            Net(), optimizer=OPTIMIZERS[name], ema_decay=0.9, strategy="zero1" if sharded else "ddp"
        )
        batches = [make_rows(seed=i) for i in range(4)]
        state, metrics = take_steps(ddp, batches, start(ddp, batches[0]))
        ends.append(host((state.params, state.ema_params, metrics)))
    for got, want in zip(*ends, strict=True):
        assert_close(got, want, rtol=ROUNDING)


def test_a_replica_keeps_its_share_of_the_optimizer_and_two_percent():
    def wide(m, x):
        scale = m.param("scale", nn.initializers.ones, ())
        return nn.Dense(1)(nn.relu(nn.Dense(1001)(x)))[:, 0] * scale

    kept = {}
    for sharded in (True, False):
        ddp = wrapped(
            Of(wide), optimizer=optax.adam(1e-3), mesh=8, strategy="zero1" if sharded else "ddp"
        )
        arrays = jax.tree.leaves(start(ddp, make_rows()).opt_state)
        kept[sharded] = sum(x.addressable_shards[0].data.nbytes for x in arrays)
        assert jddp.memory(ddp, make_rows()).optimizer == kept[sharded]
    assert kept[True] <= (1 / 8 + 0.02) * kept[False]


@in_both_places
def test_what_travels_is_each_gradient_out_and_each_parameter_back(place):
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


@pytest.mark.slow
@pytest.mark.parametrize("dropout_rate", swept([0.0, 0.2], every=2))
def test_verify_holds_it_against_one_device_or_its_shares_side_by_side(dropout_rate):
    model, batch = MODELS["mlp"](dropout_rate=dropout_rate), make_batch()
    report = jddp.verify(model, optax.adam(1e-3), loss_fn, batch, strategy="zero1")
    assert report.passed, str(report)
    assert report.is_side_by_side == (dropout_rate > 0)


@pytest.mark.parametrize("num", [1, 4, 7])
def test_arrays_are_their_shards_put_together(num):
    shapes = [(5,), (3, 4), (2, 0, 3), (1, 1), (2, 3, 5)]
    arrays = [np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in shapes]
    rows = pack([jnp.asarray(x) for x in arrays], num)
    parts = [shard_shape(shape, num) for shape in shapes]
    assert rows.shape == (num, sum(part[0] for part in parts))
    assert [len(part) for part in parts] == [len(shape) for shape in shapes]
    for got, want in zip(unpack(rows, shapes), arrays, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_a_checkpoint_resumes_sharded_or_whole_on_any_number_of_devices(tmp_path):
    batch, optimizer = make_rows(24), optax.adam(1e-2)

    def made(sharded, num, optimizer=optimizer):
        ddp = wrapped(Net(), optimizer=optimizer, mesh=num, strategy="zero1" if sharded else "ddp")
        return ddp, start(ddp, batch)

    alone, state = made(False, 1)
    for step, (sharded, num) in enumerate([(True, 8), (True, 4), (False, 2), (True, 3)]):
        ddp, moving = made(sharded, num)
        checkpoints = CheckpointFolder(tmp_path, keep=2)
        if step:
            restored = checkpoints.restore(moving, ddp.steps.layouts(moving))
            assert restored.step == step
            moving = restored.state
        moving, _ = ddp.step(moving, batch)
        state, _ = alone.step(state, batch)
        checkpoints.save(step + 1, moving, {}, ddp.steps.layouts(moving))
        checkpoints.close()
        # Whole, the optimizer's state is that of one device.
        whole = jax.tree.map(
            lambda x, like: np.asarray(x).ravel()[: like.size].reshape(like.shape),
            moving.opt_state,
            state.opt_state,
        )
        assert_close(whole, host(state.opt_state), rtol=ROUNDING)
        assert_close(host(moving.params), host(state.params), rtol=ROUNDING)
    other, like = made(True, 4, optax.sgd(0.1, momentum=0.9))
    with pytest.raises(ConfigError, match="another model, optimizer"):
        CheckpointFolder(tmp_path, keep=1).restore(like, other.steps.layouts(like))


def of_all_shapes(m, x, empty):
    number = m.param("number", nn.initializers.ones, ())
    m.param("empty", nn.initializers.ones, empty)
    odd, one = (m.param(str(n), nn.initializers.normal(1.0), (n,)) for n in (3, 1))
    row = m.param("row", nn.initializers.normal(1.0), (1, 8))
    return (nn.Dense(3)(x) * number + odd + one).sum(1) + (nn.Dense(8)(x) * row).sum(1)


PAIRS = [(a, b) for a in ("ddp", "zero1", "fsdp") for b in ("ddp", "zero1", "fsdp") if a != b]
RESUMED = {
    "adam": (optax.adam(1e-2, eps=1e-3), (0, 4)),
    "muon": (optax.contrib.muon(1e-2, eps=1e-3), (0,)),  # It divides by the dims of a matrix.
}


@pytest.mark.parametrize("optimizer", swept([*RESUMED], every=2))
@pytest.mark.parametrize(("first", "second"), swept(PAIRS, every=3))
def test_a_run_goes_from_each_strategy_to_another_with_arrays_of_any_shape(
    first, second, optimizer, tmp_path
):
    tx, empty = RESUMED[optimizer]
    model, ends = Of(functools.partial(of_all_shapes, empty=empty)), []
    with jax.numpy_rank_promotion("allow"):
        for strategies in ((first, second), ("ddp", "ddp")):
            with contextlib.closing(CheckpointFolder(tmp_path / strategies[1], keep=1)) as folder:
                for step, strategy in enumerate(strategies):
                    ddp = wrapped(model, optimizer=tx, strategy=strategy, mesh=4)
                    state = start(ddp, make_rows())
                    if step:
                        state = folder.restore(state, ddp.steps.layouts(state)).state
                    state, _ = ddp.step(state, make_rows(seed=step))
                    folder.save(step + 1, state, {}, ddp.steps.layouts(state))
            ends.append(host(state.params))
        assert_close(*ends, rtol=ROUNDING)
