"""Checkpoints: what comes back is what went in, bit by bit, onto any mesh that can hold it."""

import contextlib
import errno
import functools
import json
import logging
import os
import re
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
import tiny
from flax import nnx
from jax import P
from judge import host
from runs import ROOT, contents, files_up_to, write_sealed
from states import assert_same, copied, equal
from sweeps import swept
from tiny import ConvNet, NnxConvNet, make_batch, take_steps

import jddp
from jddp.checkpoint import folders, reader
from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.checkpoint.folders import find_damage, seal
from jddp.checkpoint.reader import read_newest
from jddp.checkpoint.weights import read_weights
from jddp.commands.runs import checkpoint_command
from jddp.engine.mesh import make_mesh, replicate
from jddp.engine.state import by_path
from jddp.ground.errors import ConfigError, FileSystemError, UsageError

NUM_REPLICAS = 4
wrapped = functools.partial(tiny.wrapped, mesh=NUM_REPLICAS)


def stepped(ddp, num_steps=1, state=None):
    return take_steps(ddp, [make_batch(seed=seed) for seed in range(num_steps)], state)[0]


@pytest.fixture(scope="module")
def state():
    """The first state of the smallest model, which no step takes."""
    return wrapped().init(0, make_batch())


@pytest.fixture
def checkpoints(tmp_path):
    opened = CheckpointFolder(tmp_path / "checkpoints", keep=3)
    yield opened
    opened.close()


def memory(on_resize):
    """A hook that remembers a number of its own on each replica."""

    def reduce(bucket, comm_state, axis):
        return jax.lax.pmean(bucket, axis), comm_state + 1.0 + jax.lax.axis_index(axis)

    return jddp.CommHook(lambda plan: jnp.zeros(3), reduce, on_resize)


def spread(tree, sharding):
    """Other numbers in every leaf, on devices; keys stay keys."""
    rng = np.random.default_rng(0)

    def fill(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        numbers = x if is_key else (rng.normal(size=x.shape) * 100).astype(x.dtype)
        return jax.device_put(numbers, sharding)

    return jax.tree.map(fill, tree)


PARAMS = {
    "half": jnp.zeros((3, 2), jnp.bfloat16),
    "full": {"kernel": jnp.zeros((8, 3)), "scale": jnp.zeros(())},
    "list": {0: jnp.zeros(2), 10: jnp.zeros(2)},  # as nnx.List has its layers
    "no units": jnp.zeros((0, 3)),
}


def test_every_leaf_comes_back_as_it_was(checkpoints, tmp_path):
    mesh, matrices = wrapped().mesh, lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    optimizer = optax.chain(
        optax.masked(optax.scale_by_adam(mu_dtype=jnp.bfloat16), matrices),
        optax.add_noise(0.1, 0.5, 3),
        optax.adafactor(optax.cosine_decay_schedule(0.1, 10), min_dim_size_to_factor=2),
    )
    keys = {"count": jnp.uint32(0), "keys": jax.random.split(jax.random.key(1), 3)}
    begun = wrapped().init(0, make_batch()).replace(params=PARAMS, ema_params=PARAMS)
    begun = begun.replace(model_state=keys, opt_state=optimizer.init(PARAMS))
    state = spread(begun, jax.NamedSharding(mesh, P()))
    rows = jnp.arange(NUM_REPLICAS * 2.0).reshape(NUM_REPLICAS, 2)
    own = jax.device_put(rows, jax.NamedSharding(mesh, P("data")))
    state = state.replace(model_state={**state.model_state, "own": own})
    beside = {"position": {"epoch": 2}, "nothing": None}
    checkpoints.save(7, state, beside)
    restored = checkpoints.restore(like=state)
    assert_same(restored.state, state)
    assert (restored.step, restored.beside) == (7, beside)
    assert read_newest(tmp_path / "checkpoints", ["params"])["params"]["no units"].shape == (0, 3)


@pytest.mark.parametrize(
    "model", [ConvNet(dropout_rate=0.3), NnxConvNet(nnx.Rngs(0), dropout_rate=0.3)], ids=type
)
def test_a_restored_state_takes_the_same_steps_and_is_donated(checkpoints, model):
    ddp = wrapped(model, optax.adamw(0.1), ema_decay=0.9)
    state = stepped(ddp)
    checkpoints.save(1, state, {})
    restored = checkpoints.restore(like=state).state
    want = stepped(ddp, 2, state)
    assert_same(stepped(ddp, 2, restored), want)
    with pytest.raises(UsageError, match="This state was given to step call"):
        ddp.step(restored, make_batch())
    # The state that was restored to may be gone, as it is after a step.
    assert_same(stepped(ddp, 2, checkpoints.restore(like=restored).state), want)


def test_training_may_continue_while_a_checkpoint_is_being_written(tmp_path):
    checkpoints = CheckpointFolder(tmp_path, keep=5)
    ddp, copies = wrapped(optimizer=optax.adam(0.1)), {}
    state = ddp.init(0, make_batch())
    for step in range(1, 4):
        state = stepped(ddp, 1, state)
        copies[step] = copied(state)
        checkpoints.save(step, state, {})  # and the next step takes its memory
    state = stepped(ddp, 3, state)
    checkpoints.close()
    for step in (3, 2, 1):
        assert_same(CheckpointFolder(tmp_path, keep=5).restore(like=state).state, copies[step])
        shutil.rmtree(tmp_path / str(step))


def test_a_step_that_is_saved_again_or_of_an_earlier_life_of_the_run_is_replaced(tmp_path, state):
    for life in ("first", "second"):
        checkpoints = CheckpointFolder(tmp_path, keep=2)
        assert (checkpoints.restore(like=state) is None) == (life == "first")
        for beside in ({}, {"life": life}):
            checkpoints.save(30, state, beside)
        assert checkpoints.restore(like=state).beside == {"life": life}
        checkpoints.close()
    assert names_in(tmp_path) == {"30"}


@pytest.mark.parametrize("num_renamed", [0, 1, 2])
def test_a_process_that_dies_as_it_replaces_a_checkpoint_loses_none(saved, state, num_renamed):
    shutil.copytree(saved / "4", saved / "4.new")
    shutil.rmtree(saved / "2")
    dies = [os.rename] * num_renamed + [mock.Mock(side_effect=KeyboardInterrupt)]
    with (
        mock.patch("os.rename", lambda *paths: dies.pop(0)(*paths)),
        mock.patch("shutil.rmtree", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        folders.commit(saved, 4)
    assert CheckpointFolder(saved, keep=1).restore(like=state).step == 4
    assert names_in(saved) == {"4"}


def names_in(path):
    return {each.name for each in path.iterdir()}


def save_all(path, state, steps, **options):
    checkpoints = CheckpointFolder(path, **options)
    for step in steps:
        checkpoints.save(step, state, {"position": step})
    checkpoints.close()


@pytest.mark.parametrize(
    "keep, every, stay", [(2, None, "40 50"), (9, None, "10 20 30 40 50"), (1, 20, "20 40 50")]
)
def test_the_newest_stay_and_every_so_many_steps_one(tmp_path, state, keep, every, stay):
    save_all(tmp_path, state, (10, 20, 30, 40, 50), keep=keep, keep_every=every)
    assert names_in(tmp_path) == set(stay.split())


def described_in(folder):
    return json.loads((folder / "arrays.json").read_text())


def statistics_of(state):
    return state.model_state["batch_stats"]["BatchNorm_0"]["mean"]


ON_TWO = {"sum": lambda x: x.sum(0) / 2, "mean": lambda x: x.mean(0), "drop": lambda x: 0 * x[0]}


@pytest.mark.parametrize("rule", swept([*ON_TWO], every=2))
def test_what_replicas_have_of_their_own_follows_its_rule_on_another_mesh(checkpoints, rule):
    options = {"batch_norm": "local", "reduction": jddp.Reduction(hook=memory(rule))}
    before, after = (wrapped(ConvNet(), mesh=size, **options) for size in (4, 2))
    state = stepped(before, 2)
    checkpoints.save(2, state, {}, before.steps.layouts(state))
    like = after.init(1, make_batch())
    restored = checkpoints.restore(like, after.steps.layouts(like)).state
    assert {x.sharding.mesh.size for x in jax.tree.leaves(restored)} == {2}
    equal(restored.params, state.params)
    for saved, got, combine in (
        (statistics_of(state), statistics_of(restored), ON_TWO["mean"]),
        (state.comm_state.hook, restored.comm_state.hook, ON_TWO[rule]),
    ):
        assert len(np.unique(saved, axis=0)) == 4
        assert (got.shape[0], got.sharding) == (2, jax.NamedSharding(after.mesh, P("data")))
        for row in np.asarray(got):
            np.testing.assert_allclose(row, combine(np.asarray(saved)), rtol=1e-6)
    stepped(after, 1, restored)


@pytest.fixture(scope="module")
def every_layout(tmp_path_factory):
    """The wrapper and the state of a checkpoint with arrays of every layout, and its folder."""
    options = {"batch_norm": "local", "reduction": jddp.Reduction(hook=memory("sum"))}
    ddp = wrapped(ConvNet(), optax.adam(0.1), strategy="zero1", **options)
    state, directory = stepped(ddp, 2), tmp_path_factory.mktemp("layouts")
    with contextlib.closing(CheckpointFolder(directory, keep=1)) as checkpoints:
        checkpoints.save(2, state, {"world": ddp.steps.topology}, ddp.steps.layouts(state))
    return ddp, state, directory


def test_a_checkpoint_says_how_every_array_lies(every_layout):
    ddp, state, directory = every_layout
    layouts = {name: about["layout"] for name, about in described_in(directory / "2").items()}
    assert layouts["params/Conv_0/kernel"] == layouts["opt_state/0/count"] == "replicated"
    assert layouts["opt_state/0/mu/Conv_0/kernel"] == {"sharded": [3, 3, 1, 4]}
    assert layouts["model_state/batch_stats/BatchNorm_0/mean"] == {"per_replica": "mean"}
    assert layouts["comm_state/hook"] == {"per_replica": "sum"}
    values = read_newest(directory, ["params", "model_state"])
    got = values["model_state"]["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(got, np.asarray(statistics_of(state)).mean(0), rtol=1e-6)
    # A run starts from it, whatever its replicas had of their own.
    np.testing.assert_array_equal(statistics_of(ddp.init(0, make_batch(), params=values))[3], got)


ONE = {"shape": [1], "dtype": "float32", "digest": "00000000", "layout": "replicated"}
KERNEL = "params/Conv_0/kernel"
FORGED = {
    "another rule": ("comm_state/hook", {"layout": {"per_replica": "mean"}}, ConfigError),
    "not a replica's own": ("comm_state/hook", {"layout": "replicated"}, ConfigError),
    "another whole": ("opt_state/0/mu/Conv_0/kernel", {"layout": {"sharded": [35]}}, ConfigError),
    "no such rule": ("comm_state/hook", {"layout": {"per_replica": "max"}}, FileSystemError),
    "nothing": ("key", {"layout": None}, FileSystemError),
    "another shape": (KERNEL, {"shape": [8, 32]}, ConfigError),
    "more than any memory": (KERNEL, {"shape": [10**9, 10**9]}, ConfigError),
    "a dtype of pointers": (KERNEL, {"dtype": "O"}, ConfigError),
    "a name that leads elsewhere": ("../../../etc/passwd", ONE, ConfigError),
    "a name that writes to a terminal": ("a\x1b[2J\nb", ONE, ConfigError),
}


@pytest.mark.parametrize("name, entry, error", FORGED.values(), ids=FORGED)
def test_a_description_that_is_not_of_the_arrays_stored_is_refused(
    every_layout, tmp_path, capsys, name, entry, error
):
    ddp, state, directory = every_layout
    directory = shutil.copytree(directory, tmp_path / "checkpoints")
    described = described_in(directory / "2")
    described[name] = described.get(name, {}) | entry
    write_sealed(directory / "2", "arrays.json", json.dumps(described))
    if "layout" not in entry or name not in by_path(state):
        assert checkpoint_command(["verify", str(directory)]) == 74
        assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())
    with pytest.raises(error):
        CheckpointFolder(directory, keep=1).restore(state, ddp.steps.layouts(state))


MANY = {f"w{i}": jnp.ones(3) for i in range(10, 56)}
DIFFER = {
    "tree": (
        {"a": {"b": {"w": jnp.ones(1)}, "same": jnp.ones(3)}, "cast": jnp.ones(3)},
        {"a": {"same": jnp.ones(3)}, "c": jnp.ones(4), "cast": jnp.ones(3, jnp.bfloat16)},
        "a/b/w: (1,) float32 there, absent here\n"
        "  params/c: absent there, (4,) float32 here\n"
        "  params/cast: (3,) float32 there, (3,) bfloat16 here",
    ),
    "much": (MANY, {}, "w29: (3,) float32 there, absent here\n  and 26 more"),
}


@pytest.mark.parametrize("saved, wanted, tree", DIFFER.values(), ids=DIFFER)
def test_what_differs_is_refused_by_its_paths_and_never_cast_or_cut_to_fit(
    checkpoints, state, saved, wanted, tree
):
    def of(params):
        return state.replace(params=jax.device_put(params, state.key.sharding))

    checkpoints.save(3, of(saved), {})
    with pytest.raises(ConfigError) as caught:
        checkpoints.restore(like=of(wanted))
    first, *lines = str(caught.value).splitlines()
    assert "step 3 is from another model, optimizer or mesh. Choose another directory" in first
    assert "\n".join(lines).endswith(f"  params/{tree}")


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("saved")
    save_all(path, state, (2, 4), keep=2)
    return path


@pytest.fixture
def saved(two_saved, tmp_path):
    return shutil.copytree(two_saved, tmp_path / "saved")


def test_coreutils_read_the_digests_and_every_bit_that_flips_in_any_file_is_found(saved):
    for folder in saved.iterdir():
        subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True)
    rng, folder = np.random.default_rng(0), saved / "4"
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) >= 8
    for file in files:
        sound = file.read_bytes()
        changed = [sound[:cut] for cut in (0, 1, len(sound) // 2, len(sound) - 1)]
        for position in rng.integers(0, 8 * len(sound), 8):
            changed.append(bytearray(sound))
            changed[-1][position // 8] ^= 1 << position % 8
        for content in changed:
            file.write_bytes(content)
            assert find_damage(folder) is not None, file
        file.write_bytes(sound)
    assert find_damage(folder) is None


def drop_last_line(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def replace_by_link(path):
    """The same content, outside of the folder."""
    path.rename(path.parents[2] / f"of {path.name}")
    path.symlink_to(path.parents[2] / f"of {path.name}")


def replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


HIDES = f"# 1 files\n{'0' * 64}  ../../etc/passwd\n"
DAMAGES = {
    "removed": (lambda x: (x / "run.json").unlink(), "run.json is missing"),
    "torn list": (lambda x: os.truncate(x / "SHA256SUMS", 70), "SHA256SUMS is torn"),
    "no list": (lambda x: (x / "SHA256SUMS").unlink(), "No such file"),
    "no text": (lambda x: (x / "SHA256SUMS").write_bytes(b"\xff"), "can't decode"),
    "a line less": (lambda x: drop_last_line(x / "SHA256SUMS"), "SHA256SUMS is torn"),
    "the list a link": (lambda x: replace_by_link(x / "SHA256SUMS"), "SHA256SUMS is a link"),
    "a link": (lambda x: replace_by_link(x / "run.json"), "run.json is missing, or a link"),
    "a folder that is a link": (lambda x: replace_by_link(x / "state"), "is missing"),
    "a pipe": (lambda x: replace_by_pipe(x / "run.json"), "run.json is missing"),
    "a list that hides": (lambda x: (x / "SHA256SUMS").write_text(HIDES), "etc/passwd is missing"),
    "another's": (lambda x: shutil.copy(x.parent / "2/run.json", x), "does not match its digest"),
}


@pytest.mark.parametrize("damage, reported", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_used(
    saved, state, caplog, damage, reported
):
    damage(saved / "4")
    before = contents(saved / "4")
    checkpoints = CheckpointFolder(saved, keep=2)
    step, restored, beside = checkpoints.restore(like=state)
    assert (step, beside) == (2, {"position": 2})
    assert_same(restored, state)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "jddp"]
    assert reported in line
    assert line.endswith(f"It is kept as {saved}/4.damaged.")
    assert contents(saved / "4.damaged") == before
    checkpoints.save(4, state, {"position": "again"})  # and the run comes by once more
    assert checkpoints.restore(like=state).beside == {"position": "again"}
    (saved / "4" / "run.json").unlink()
    assert checkpoints.restore(like=state).step == 2
    assert names_in(saved) == {"2", "4.damaged", "4.damaged.1"}


def test_a_file_that_is_in_no_list_is_ignored(saved, state, caplog):
    sealed = saved / "4"
    (sealed / "SHA256SUMS").unlink()
    (sealed / "state" / ".nfs0000000001").touch()  # which comes and goes while it is sealed
    seal(sealed)
    (sealed / "state" / ".nfs0000000001").unlink()
    for place in (saved, sealed, sealed / "state"):
        (place / ".DS_Store").touch()
    shutil.copytree(sealed / "state", sealed / "copy of state")
    (sealed / "state" / "x").symlink_to("/")
    (sealed / "x").symlink_to("x")
    os.mkfifo(sealed / "state" / "pipe")
    assert CheckpointFolder(saved, keep=2).restore(like=state).step == 4
    assert names_in(saved) == {"2", "4", ".DS_Store"}
    equal(read_newest(saved, ["params"]), {"params": state.params})
    assert checkpoint_command(["list", str(saved)]) == 0
    assert not [record for record in caplog.records if record.name == "jddp"]


def test_what_cannot_be_read_or_is_another_array_is_found_though_the_digests_of_files_hold(
    saved, state, caplog
):
    described = described_in(saved / "4")  # Whoever wrote the files may have been wrong already.
    described["params/Dense_1/kernel"]["digest"] = "00000000"
    write_sealed(saved / "4", "arrays.json", json.dumps(described))
    assert CheckpointFolder(saved, keep=2).restore(like=state).step == 2
    assert "params/Dense_1/kernel is not the array that was saved" in caplog.text
    write_sealed(saved / "2", "state/_METADATA", "[]")
    with pytest.raises(FileSystemError, match=r"\A.*cannot be read at step 2: .*\Z"):  # one line
        CheckpointFolder(saved, keep=2).restore(like=state)


def test_if_no_checkpoint_can_be_trusted_nothing_starts_anew(saved, state):
    for step in ("2", "4"):
        (saved / step / "arrays.json").unlink()
    with pytest.raises(FileSystemError, match="but all are damaged: they are now ") as got:
        CheckpointFolder(saved, keep=2).restore(like=state)
    assert (got.value.exit_code, len(str(got.value).splitlines())) == (74, 1)
    assert names_in(saved) == {"2.damaged", "4.damaged"}


@pytest.fixture
def stuck(monkeypatch):
    """Names of folders that a file system does not remove, as NFS while a file in them is open."""
    names, remove = set(), shutil.rmtree

    def refuse(path, ignore_errors=False):
        if Path(path).name in names:
            if not ignore_errors:
                raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        else:
            remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    return names


def test_a_checkpoint_is_saved_though_an_older_one_cannot_be_removed(saved, state, stuck, caplog):
    stuck |= {"2.old", "4.old"}
    with contextlib.closing(CheckpointFolder(saved, keep=1)) as checkpoints:
        checkpoints.save(6, state, {})
        checkpoints.wait()
        assert names_in(saved) == {"2.old", "4.old", "6"}
        (line,) = [x for x in caplog.records if x.name == "jddp"]
        assert line.levelname == "WARNING"
        assert re.search(r"step 6 is saved, .* keeps \d.old, \d.old", line.getMessage())
        for _ in range(2):  # in the place of one that was stuck
            checkpoints.save(4, state, {})
        checkpoints.wait()
        assert "4" in names_in(saved)
        CheckpointFolder(saved, keep=1)  # They keep no run from its start.
        assert "leftovers cannot be removed: " in caplog.text
        stuck.clear()
        checkpoints.save(10, state, {})
    assert names_in(saved) == {"10"}


def test_what_a_process_that_died_was_writing_or_removing_is_no_checkpoint(saved, state):
    for name in ("6.new", "1.old", "02", "030", "007.new"):
        shutil.copytree(saved / "4", saved / name)
    (saved / "notes").mkdir()  # A user's, as is a folder whose number begins with a zero.
    checkpoints = CheckpointFolder(saved, keep=2)
    assert names_in(saved) == {"2", "4", "notes", "02", "030", "007.new"}
    assert checkpoints.restore(like=state).step == 4
    assert checkpoint_command(["list", str(saved)]) == 0


def test_the_next_checkpoint_is_read_where_a_run_removes_the_newest_as_it_is_checked(
    saved, state, monkeypatch, caplog
):
    read = reader.read_object

    def late(path):
        if path.parent.name == "4":  # The run has named a newer one.
            write_sealed(path.parent.rename(saved / "6"), "run.json", '{"step": 6}')
        return read(path)

    monkeypatch.setattr(reader, "read_object", late)
    equal(read_newest(saved, ["params"]), {"params": state.params})
    assert names_in(saved) == {"2", "6"}
    assert not [x for x in caplog.records if x.name == "jddp"]


def test_of_several_writes_that_are_refused_one_is_reported(tmp_path, state, caplog, capfd):
    noise = np.random.default_rng(0).random((30, 10_000))  # which cannot be compressed
    arrays = {str(i): jax.device_put(x, state.key.sharding) for i, x in enumerate(noise)}
    with files_up_to(2**16), contextlib.closing(CheckpointFolder(tmp_path, keep=1)) as unwritten:
        for step in range(3):
            unwritten.save(step, state.replace(params=arrays), {})
            with pytest.raises(FileSystemError, match="File too large"):
                unwritten.wait()
        unwritten.save(4, state, {})
    (reported,) = [x for x in caplog.records if x.levelno > logging.INFO]
    assert reported.levelname == "ERROR"
    assert "step 0 cannot be saved: process 0: " in reported.getMessage()
    assert "Traceback" not in capfd.readouterr().err
    assert CheckpointFolder(tmp_path, keep=1).restore(like=state).step == 4


def test_a_checkpoint_under_another_number_is_not_read_and_set_aside(
    saved, state, tmp_path, caplog, capsys
):
    (saved / "4").rename(saved / "5")
    values = read_newest(saved, ["params"])["params"]
    assert jax.tree.map(np.shape, values) == jax.tree.map(np.shape, state.params)
    assert "5 is skipped: it was saved as step 4" in caplog.text
    assert checkpoint_command(["verify", str(saved)]) == 74
    file = tmp_path / "weights.safetensors"
    assert checkpoint_command(["export", str(saved), str(file), "--step", "5"]) == 74
    assert "5 cannot be read as step 5: it was saved as step 4" in capsys.readouterr().err
    assert not file.exists()
    assert CheckpointFolder(saved, keep=3).restore(like=state).beside == {"position": 2}
    assert names_in(saved) == {"2", "5.damaged"}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run directory with checkpoints of steps 1 and 3, both of one state."""
    run_dir, state = tmp_path_factory.mktemp("run"), stepped(wrapped(ConvNet(), ema_decay=0.5))
    save_all(run_dir / "checkpoints", state, (1, 3), keep=2)
    return run_dir, state


@pytest.fixture
def run(original, tmp_path):
    return shutil.copytree(original[0], tmp_path / "run"), original[1]


def test_a_line_tells_each_checkpoint_those_that_were_set_aside_too(run, capsys):
    path, _ = run
    shutil.copytree(path / "checkpoints" / "1", path / "checkpoints" / "2.damaged")
    (path / "checkpoints" / "1" / "run.json").write_text("{")
    for where in (path, path / "checkpoints"):
        assert checkpoint_command(["list", str(where)]) == 0
        first, *_ = lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == ["1", "2.damaged", "3"]
        assert first.endswith("not readable")
        assert max(map(len, lines)) <= 80


def test_every_file_and_every_array_is_held_against_its_digest(run, capsys):
    path, _ = run
    assert checkpoint_command(["verify", str(path)]) == 0
    sound = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in sound] == [["1", "all"], ["3", "all"]]
    described = described_in(path / "checkpoints" / "1")
    described[KERNEL]["digest"] = "00000000"
    write_sealed(path / "checkpoints" / "1", "arrays.json", json.dumps(described))
    (path / "checkpoints" / "3" / "state" / "_METADATA").unlink()
    assert checkpoint_command(["verify", str(path)]) == 74
    captured = capsys.readouterr()
    assert f"{KERNEL} is not the array that was saved" in captured.out
    assert "state/_METADATA is missing" in captured.out
    assert "2 damaged" in captured.err


def test_a_model_is_exported_and_the_lines_of_a_page_load_it_into_plain_flax(run, tmp_path, capsys):
    file = tmp_path / "mine.safetensors"
    assert checkpoint_command(["export", str(run[0]), str(file), "--step", "1"]) == 0
    assert "step 1 is in " in capsys.readouterr().out
    fields = {"params", "ema_params", "model_state", "ema_state"}
    assert {name.split("/")[0] for name in safetensors.numpy.load_file(file)} == fields
    page = (ROOT / "docs" / "fine_tuning.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (lines,) = [block for block in blocks if "def variables_in" in block]
    defined = {"safetensors": safetensors}
    exec(lines, defined)
    x, want = make_batch()["x"], {"params": run[1].params, **run[1].model_state}
    got, want = (ConvNet().apply(y, x, False) for y in (defined["variables_in"](file), host(want)))
    np.testing.assert_array_equal(got, want)


def test_arrays_of_64_bits_are_exported_bitwise_identical(tmp_path):
    with jax.enable_x64(True):
        wide = replicate({"params": {"x": np.array([1 / 3])}}, make_mesh(1))
        save_all(tmp_path / "a", wide, [3], keep=1)
    assert checkpoint_command(["verify", str(tmp_path / "a")]) == 0
    assert checkpoint_command(["export", str(tmp_path / "a"), str(tmp_path / "x.safetensors")]) == 0
    assert read_weights(tmp_path / "x.safetensors")["params"]["x"].tolist() == [1 / 3]


def test_a_mistake_is_one_line(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.safetensors").write_bytes(b"")
    narrow = jax.device_put(jnp.ones(4, jnp.int4), run[1].step.sharding)
    save_all(tmp_path / "narrow/checkpoints", run[1].replace(params={"x": narrow}), [1], keep=1)
    assert read_weights(tmp_path / "narrow")["params"]["x"].dtype == jnp.int4  # as the message says
    before = sorted(tmp_path.rglob("*"))
    for arguments, code, message in (
        ("export run x.npz", 2, "unknown format. Use a name in .safetensors"),
        ("export run there.safetensors", 74, "cannot be written: File exists"),
        ("export run x.safetensors --step 2", 74, "cannot be read"),
        ("export narrow x.safetensors", 2, "int4"),
        ("list nowhere", 2, "nowhere holds no checkpoints. Name a run directory"),
    ):
        assert checkpoint_command(arguments.split()) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("jddp: ")
        assert message in line
        assert sorted(tmp_path.rglob("*")) == before
