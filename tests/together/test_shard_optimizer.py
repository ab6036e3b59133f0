"""Each replica updates its part of every parameter: the same numbers, a part of the memory."""

import jax
import jax.numpy as jnp
import judge
import numpy as np
import optax
import pytest
from flax import linen as nn
from judge import Half, Net, assert_close, host, in_both_places, make_rows, sent, start, wrapped
from tiny import MODELS, Of, loss_fn, make_batch, take_steps

import jddp
from jddp.checkpoint.checkpoints import Checkpoints
from jddp.errors import ConfigError
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
}

MIXING = {
    "lamb": optax.lamb(1e-3),
    "lars": optax.lars(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "clipping of its own": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.sgd(0.1)),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "a mask by shape": optax.adamw(1e-3, mask=lambda p: jax.tree.map(lambda x: x.size > 9, p)),
}


def trained(*, sharded, model=None, loss=judge.squares, batches=None, num_steps=4, **options):
    """A state after some steps, and the metrics of the last."""
    ddp = wrapped(model or Net(), loss, shard_optimizer=sharded, **options)
    batches = batches or [make_rows(seed=i) for i in range(num_steps)]
    return take_steps(ddp, batches, start(ddp, batches[0]))


def assert_alike(rtol=ROUNDING, **options):
    (got, metrics), (want, wanted) = (trained(sharded=s, **options) for s in (True, False))
    assert_close(host(got.params), host(want.params), rtol=rtol)
    assert_close(host(metrics), host(wanted), rtol=rtol)
    return got, want


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_those_of_the_whole_update(name):
    assert_alike(optimizer=OPTIMIZERS[name], ema_decay=0.9)


@in_both_places
def test_so_they_are_wherever_buckets_are_reduced(place):
    got, want = assert_alike(**place, accumulate_steps=2, max_grad_norm=0.5, ema_decay=0.9)
    assert_close(host(got.ema_params), host(want.ema_params), rtol=ROUNDING)


def test_so_they_are_for_an_nnx_model_with_batch_norm_and_dropout():
    batches = [make_batch(32, seed=i, masked=True) for i in range(3)]
    options = {"model": MODELS["nnx"](dropout_rate=0.2), "loss": loss_fn, "batches": batches}
    assert_alike(**options, optimizer=optax.sgd(0.1, momentum=0.9))


@pytest.mark.parametrize("name", MIXING)
def test_an_optimizer_that_mixes_elements_is_refused_with_the_reason(name):
    with pytest.raises(ConfigError, match=r"does not work element by element: it .*max_grad_norm"):
        trained(sharded=True, optimizer=MIXING[name])


def growing_with_size():
    """Whose first state depends on how large an array is, and whose update does not."""
    adam = optax.adam(1e-3)

    def init(params):
        fill = jax.tree.map(lambda x: jnp.ones_like(x) if x.size > 9 else jnp.zeros_like(x), params)
        return adam.init(params), fill

    def update(grads, state, params=None):
        updates, inner = adam.update(grads, state[0], params)
        return jax.tree.map(jnp.multiply, updates, state[1]), (inner, state[1])

    return optax.GradientTransformation(init, update)


def test_an_optimizer_that_begins_otherwise_with_shards_is_refused():
    with pytest.raises(ConfigError, match="something else with arrays of other shapes"):
        trained(sharded=True, optimizer=growing_with_size())


def wide(m, x):
    scale = m.param("scale", nn.initializers.ones, ())
    return nn.Dense(1)(nn.relu(nn.Dense(1001)(x)))[:, 0] * scale


def test_a_replica_keeps_its_share_of_the_optimizer_and_two_percent():
    kept = {}
    for sharded in (True, False):
        ddp = wrapped(Of(wide), optimizer=optax.adam(1e-3), mesh=8, shard_optimizer=sharded)
        arrays = jax.tree.leaves(start(ddp, make_rows()).opt_state)
        kept[sharded] = sum(x.addressable_shards[0].data.nbytes for x in arrays)
        assert ddp.memory(make_rows()).optimizer == kept[sharded]
    assert kept[True] <= (1 / 8 + 0.02) * kept[False]


@in_both_places
def test_what_travels_is_each_gradient_out_and_each_parameter_back(place):
    ddp = wrapped(Net(), shard_optimizer=True, **place)
    state, found = start(ddp, make_rows()), sent(ddp)
    sizes = {op: [x.num_elements for x in found if x.op == op] for op in {x.op for x in found}}
    padded = sum(4 * shard_shape(x.shape, 4)[0] for x in jax.tree.leaves(state.params))
    # CPUs send the rows of a bucket to whom they belong and add them there: as many bytes.
    assert sum(sizes["all-to-all"]) == sum(sizes["all-gather"]) == padded
    assert sizes["all-reduce"] == [2]  # The loss and the count.
    if place["layout"] == "flat":
        assert len(sizes["all-to-all"]) == len(sizes["all-gather"]) == len(ddp.plan)
    found = sent(wrapped(Net(), shard_optimizer=True, max_grad_norm=1.0, **place))
    assert sorted(x.num_elements for x in found if x.op == "all-reduce") == [1, 2]


def test_explain_names_what_comes_back():
    ddp = wrapped(Net(), shard_optimizer=True)
    rows = str(ddp.explain(make_rows())).splitlines()
    purposes = {tuple(row.split()[3:4] + row.split()[5:]) for row in rows if " f32 " in row}
    assert {("all-to-all", "gradients"), ("all-gather", "parameters,", "updated")} <= purposes


def test_a_step_that_is_not_finite_is_skipped_by_all():
    batches = [make_rows(), make_rows(seed=1), make_rows(seed=2)]
    batches[1]["x"][-1] = np.nan  # on the last replica, in the first layer's gradient
    got, want = assert_alike(batches=batches, skip_nonfinite=True, optimizer=optax.adam(1e-2))
    assert int(got.skipped) == int(want.skipped) == 1


@pytest.mark.parametrize("policy", ["zero", "skip"])
def test_unused_parameters_follow_their_policy(policy):
    options = {"optimizer": optax.adamw(1e-2, weight_decay=0.5), "unused_parameters": policy}
    got, _ = assert_alike(model=Half(), **options)
    first = start(wrapped(Half()), make_rows()).params["unused"]["kernel"]
    assert np.array_equal(got.params["unused"]["kernel"], first) == (policy == "skip")


def test_a_hook_of_ones_own_and_a_narrow_wire_go_with_it():
    hook = jddp.CommHook(lambda plan: (), lambda b, s, axis: (jax.lax.pmean(b, axis), s))
    assert_alike(comm_hook=hook)
    # Rounded alike on the way, and added in float32 here, in bfloat16 there: 4 * 2^-8.
    assert_alike(wire_dtype="bfloat16", optimizer=optax.sgd(0.1), rtol=2**-6)


@pytest.mark.parametrize("dropout_rate", [0.0, 0.2])
def test_verify_holds_it_against_one_device_or_its_shares_side_by_side(dropout_rate):
    model, batch = MODELS["mlp"](dropout_rate=dropout_rate), make_batch()
    report = jddp.verify(model, optax.adam(1e-3), loss_fn, batch, shard_optimizer=True)
    assert report.passed, str(report)
    assert report.is_side_by_side == (dropout_rate > 0)


PLACES = [(True, 8), (True, 4), (False, 2), (True, 3)]


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


def test_a_checkpoint_resumes_sharded_or_whole_on_any_number_of_devices(tmp_path):
    batch, optimizer = make_rows(24), optax.adam(1e-2)

    def made(sharded, num):
        ddp = wrapped(Net(), optimizer=optimizer, mesh=num, shard_optimizer=sharded)
        return ddp, start(ddp, batch)

    alone, state = made(False, 1)
    moving = None
    for step, (sharded, num) in enumerate(PLACES, start=1):
        ddp, fresh = made(sharded, num)
        checkpoints = Checkpoints(tmp_path, keep=2)
        if moving is not None:
            restored = checkpoints.restore(fresh, ddp.steps.layouts(fresh))
            assert restored.step == step - 1
            fresh = restored.state
        moving, _ = ddp.step(fresh, batch)
        state, _ = alone.step(state, batch)
        checkpoints.save(step, moving, {}, ddp.steps.layouts(moving))
        checkpoints.close()
        # Whole, the optimizer's state is that of one device.
        whole = jax.tree.map(
            lambda x, like: np.asarray(x).ravel()[: like.size].reshape(like.shape),
            moving.opt_state,
            state.opt_state,
        )
        assert_close(whole, host(state.opt_state), rtol=ROUNDING)
        assert_close(host(moving.params), host(state.params), rtol=ROUNDING)
    other = wrapped(Net(), optimizer=optax.sgd(0.1, momentum=0.9), shard_optimizer=True)
    like = start(other, batch)
    with pytest.raises(ConfigError, match="another model, optimizer"):
        Checkpoints(tmp_path, keep=1).restore(like, other.steps.layouts(like))
