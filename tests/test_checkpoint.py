"""Checkpoints: what comes back is what went in, bit by bit, onto any mesh that can hold it."""

import functools
import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import P
from states import assert_same, copied
from tiny import MLP, ConvNet, NnxConvNet, loss_fn, make_batch

import jddp
from jddp.checkpoint import Checkpoints
from jddp.checkpoint.read import read_newest
from jddp.errors import ConfigError, FileSystemError, UsageError
from jddp.state import TrainState

NUM_REPLICAS = 4


def wrapped(model=None, optimizer=None, *, mesh=NUM_REPLICAS, **options):
    model = MLP() if model is None else model
    return jddp.DataParallel(model, optimizer or optax.sgd(0.1), loss_fn, mesh=mesh, **options)


def stepped(ddp, num_steps=1, state=None):
    state = ddp.init(0, make_batch()) if state is None else state
    for seed in range(num_steps):
        state, _ = ddp.step(state, make_batch(seed=seed))
    return state


@pytest.fixture
def checkpoints(tmp_path):
    opened = Checkpoints(tmp_path / "checkpoints", keep=3)
    yield opened
    opened.close()


def spread(tree, sharding):
    """Other numbers in every leaf, on devices; keys stay keys."""
    rng = np.random.default_rng(0)

    def fill(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.device_put(x, sharding)
        numbers = rng.normal(size=x.shape) * 100
        return jax.device_put(numbers.astype(x.dtype), sharding)

    return jax.tree.map(fill, tree)


PARAMS = {
    "half": jnp.zeros((3, 2), jnp.bfloat16),
    "full": {"kernel": jnp.zeros((8, 3)), "scale": jnp.zeros(())},
    "list": {0: jnp.zeros(2), 10: jnp.zeros(2)},  # as nnx.List has its layers
}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adamw": optax.adamw(
        optax.cosine_decay_schedule(0.1, 10), mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "chain": optax.chain(
        optax.clip(1.0), optax.scale_by_adam(mu_dtype=jnp.bfloat16), optax.add_noise(0.1, 0.5, 3)
    ),
    "factored": optax.adafactor(0.1, min_dim_size_to_factor=2),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("has_average", [False, True])
def test_every_leaf_comes_back_as_it_was(checkpoints, optimizer, has_average):
    mesh = wrapped().mesh
    state = TrainState(
        step=jnp.int32(0),
        params=PARAMS,
        ema_params=PARAMS if has_average else None,
        model_state={"count": jnp.uint32(0), "keys": jax.random.split(jax.random.key(1), 3)},
        opt_state=optimizer.init(PARAMS),
        comm_state=optax.EmptyState(),
        key=jax.random.key(3),
    )
    state = spread(state, jax.NamedSharding(mesh, P()))
    rows = jnp.arange(NUM_REPLICAS * 2.0).reshape(NUM_REPLICAS, 2)
    own = jax.device_put(rows, jax.NamedSharding(mesh, P("data")))
    state = state.replace(model_state={**state.model_state, "own": own})
    checkpoints.save(7, state, {"position": {"epoch": 2}, "nothing": None})
    restored, extra = checkpoints.restore(7, like=state)
    assert_same(restored, state)
    assert extra == {"position": {"epoch": 2}, "nothing": None}


@pytest.mark.parametrize(
    "model", [ConvNet(dropout_rate=0.3), NnxConvNet(nnx.Rngs(0), dropout_rate=0.3)], ids=type
)
def test_a_restored_state_takes_the_same_steps_and_is_donated(checkpoints, model):
    ddp = wrapped(model, optax.adamw(0.1), ema_decay=0.9)
    state = stepped(ddp)
    checkpoints.save(1, state, {})
    restored, _ = checkpoints.restore(1, like=state)
    want = stepped(ddp, 2, state)
    assert_same(stepped(ddp, 2, restored), want)
    with pytest.raises(UsageError, match="This state was given to step call"):
        ddp.step(restored, make_batch())
    # The state that was restored to may be gone, as it is after a step.
    again, _ = checkpoints.restore(1, like=restored)
    assert_same(stepped(ddp, 2, again), want)


def test_training_may_go_on_while_a_checkpoint_is_being_written(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=5)
    ddp, copies = wrapped(optimizer=optax.adam(0.1)), {}
    state = ddp.init(0, make_batch())
    for step in range(1, 6):
        state = stepped(ddp, 1, state)
        copies[step] = copied(state)
        checkpoints.save(step, state, {})  # and the next step takes its memory
    state = stepped(ddp, 3, state)
    for step, want in copies.items():
        assert_same(checkpoints.restore(step, like=state)[0], want)
    checkpoints.close()


def test_as_many_checkpoints_stay_as_are_to_be_kept(tmp_path):
    checkpoints, state = Checkpoints(tmp_path, keep=2), wrapped().init(0, make_batch())
    assert checkpoints.latest() is None
    for step in (1, 5, 30):
        checkpoints.save(step, state, {"step": step})
    checkpoints.save(30, state, {"step": "another"})  # is there, and left as it is
    checkpoints.close()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [5, 30]
    opened = Checkpoints(tmp_path, keep=2)
    assert opened.latest() == 30
    assert opened.restore(30, like=state)[1] == {"step": 30}
    opened.close()


def test_every_replica_gets_its_own_statistics_back(checkpoints):
    ddp = wrapped(ConvNet(), batch_norm="local")
    state = stepped(ddp, 2)
    mean = state.model_state["batch_stats"]["BatchNorm_0"]["mean"]
    assert len(np.unique(mean, axis=0)) == NUM_REPLICAS
    checkpoints.save(2, state, {})
    assert_same(checkpoints.restore(2, like=ddp.init(1, make_batch()))[0], state)


def test_a_state_goes_on_on_a_mesh_of_another_size(checkpoints):
    before, after = (wrapped(ConvNet(), optax.sgd(0.1, 0.9), mesh=size) for size in (8, 2))
    state = stepped(before, 2)
    checkpoints.save(2, state, {})
    restored, _ = checkpoints.restore(2, like=after.init(1, make_batch()))
    assert {x.sharding.mesh.size for x in jax.tree.leaves(restored)} == {2}
    jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)
    got, want = stepped(after, 2, restored), stepped(before, 2, state)
    # Sums of 16 rows in another order, twice.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (got.params, got.model_state), (want.params, want.model_state))


@pytest.mark.parametrize(
    "saved, wanted, what",
    [
        (
            {"model": MLP()},
            {"model": ConvNet()},
            "'params/BatchNorm_0/bias': absent there, (4,) float32 here",
        ),
        (
            {"optimizer": optax.adam(0.1)},
            {"optimizer": optax.sgd(0.1)},
            "'opt_state/0/count': () int32 there, absent here",
        ),
        (
            {"ema_decay": None},
            {"ema_decay": 0.5},
            "'ema_params/Dense_0/bias': absent there, (16,) float32 here",
        ),
        (
            {"model": ConvNet(), "batch_norm": "local", "mesh": 4},
            {"model": ConvNet(), "batch_norm": "local", "mesh": 2},
            "'model_state/batch_stats/BatchNorm_0/mean': (4, 4) float32 there, (2, 4) float32 here",
        ),
    ],
    ids=["model", "optimizer", "average", "mesh"],
)
def test_a_checkpoint_of_something_else_is_refused_with_what_differs(
    checkpoints, saved, wanted, what
):
    checkpoints.save(3, wrapped(**saved).init(0, make_batch()), {})
    with pytest.raises(ConfigError) as caught:
        checkpoints.restore(3, like=wrapped(**wanted).init(0, make_batch()))
    (line,) = str(caught.value).splitlines()
    assert "holds, at step 3, another model, optimizer or mesh: " in line
    assert f"such as {what}. Choose another run.dir" in line


@pytest.mark.parametrize("dtype, width", [(jnp.bfloat16, 3), (jnp.float32, 4)])
def test_values_are_never_cast_or_cut_to_fit(checkpoints, dtype, width):
    def state(dtype, width):
        made = wrapped().init(0, make_batch())
        return made.replace(params=jax.device_put({"w": jnp.ones(width, dtype)}, made.key.sharding))

    checkpoints.save(1, state(jnp.float32, 3), {})
    with pytest.raises(ConfigError, match=r"1 of \d+ arrays differ, such as 'params/w': \(3,\)"):
        checkpoints.restore(1, like=state(dtype, width))


@pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, 20)])
@pytest.mark.parametrize("name", ["state/_METADATA", "extra/metadata"])
def test_a_damaged_checkpoint_is_a_file_system_error_in_one_line(tmp_path, damage, name):
    checkpoints, state = Checkpoints(tmp_path, keep=1), wrapped().init(0, make_batch())
    checkpoints.save(4, state, {"position": 4})
    checkpoints.close()
    damage(tmp_path / "4" / name)
    opened = Checkpoints(tmp_path, keep=1)
    with pytest.raises(FileSystemError) as caught:
        opened.restore(4, like=state)
    opened.close()
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{tmp_path} cannot be read at step 4: ")
    assert caught.value.exit_code == 74


def test_damage_that_tensorstore_finds_is_told_in_one_line(checkpoints, monkeypatch):
    # As it is for a damaged state/manifest.ocdbt; but then the reads that are still under way
    # complain to an event loop that is gone, in the middle of another test.
    def restore(step, args):
        raise ValueError("DATA_LOSS: Error opening \"zarr\" driver\n[tensorstore_spec='...']")

    state = wrapped().init(0, make_batch())
    checkpoints.save(4, state, {})
    monkeypatch.setattr(checkpoints._manager, "restore", restore)
    with pytest.raises(FileSystemError, match=r"at step 4: DATA_LOSS: .* driver$"):
        checkpoints.restore(4, like=state)


def test_a_step_that_is_not_there_is_a_file_system_error(checkpoints):
    with pytest.raises(FileSystemError, match="cannot be read at step 9"):
        checkpoints.restore(9, like=wrapped().init(0, make_batch()))


def test_a_directory_that_cannot_be_made_is_a_file_system_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileSystemError, match="file/run cannot be opened for checkpoints: "):
        Checkpoints(tmp_path / "file" / "run", keep=1)


def test_a_save_that_was_torn_off_is_no_checkpoint(tmp_path):
    checkpoints, state = Checkpoints(tmp_path, keep=3), wrapped().init(0, make_batch())
    checkpoints.save(2, state, {})
    checkpoints.close()
    (tmp_path / "4.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    opened = Checkpoints(tmp_path, keep=3)
    assert opened.latest() == 2
    opened.save(4, state, {})
    opened.close()
    assert read_newest(tmp_path, ["step"])["step"] == 0  # the state's own


def test_values_can_be_read_without_the_program_that_wrote_them(checkpoints, tmp_path):
    state = stepped(wrapped(ConvNet()))
    checkpoints.save(1, state, {})
    checkpoints.close()
    values = read_newest(tmp_path / "checkpoints", ["params", "model_state"])
    want = jax.device_get({"params": state.params, "model_state": state.model_state})
    jax.tree.map(np.testing.assert_array_equal, values, want)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(values))
    for absent in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileSystemError):
            read_newest(absent, ["params"])


def test_those_who_log_information_are_spared_orbax(tmp_path, caplog):
    with caplog.at_level(logging.DEBUG, logger="absl"):
        checkpoints, state = Checkpoints(tmp_path, keep=1), wrapped().init(0, make_batch())
        for step in (1, 2):
            checkpoints.save(step, state, {})
        checkpoints.restore(2, like=state)
        checkpoints.close()
    assert [record for record in caplog.records if record.name == "absl"] == []
