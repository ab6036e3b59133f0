"""Your own loop: `jddp.Checkpoints`, and padding."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from runs import refused, run_python
from states import assert_same, close, copied, equal
from sweeps import swept
from tiny import ConvNet, loss_fn, make_batch, take_steps

import jddp
from jddp.commands.runs import checkpoint_command
from jddp.ground.errors import ConfigError, FileSystemError, NumericsError, UsageError

wrapped = functools.partial(tiny.wrapped, optimizer=optax.adam(0.1))


def started(ddp):
    return ddp.init(0, make_batch())


@pytest.mark.slow
def test_what_was_saved_is_restored_on_another_number_of_devices(tmp_path, capsys):
    ddp, other = wrapped(strategy="zero1", mesh=4), wrapped()
    saved = jddp.Checkpoints(tmp_path, keep=2)
    state = started(ddp)
    for i in range(1, 5):
        state, metrics = take_steps(ddp, [make_batch(seed=i)], state)
        extra = {"position": {0: i}, "loss": float(metrics["loss"]), "ends": (1, b"2")}
        saved.save(ddp, state, extra)  # and the next step takes its memory
    kept = copied(state)
    saved.wait()
    saved.save(ddp, state, extra)  # the same again, which replaces the first
    saved.wait()
    assert checkpoint_command(["verify", str(tmp_path)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["3", "4"]
    started(other)
    elsewhere = jddp.Checkpoints(tmp_path, keep=1)
    state, restored = elsewhere.restore(other)
    assert restored == extra
    equal(state.params, kept.params)
    elsewhere.save(other, take_steps(other, [make_batch()], state)[0])
    elsewhere.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["5"]
    assert saved.restore(ddp)[1] is None


def test_a_run_of_fit_is_restored_and_left_as_it_is(tmp_path):
    ddp = wrapped()
    run = jddp.fit(ddp, [make_batch()] * 2, num_steps=2, run_dir=tmp_path)
    state, beside = jddp.Checkpoints(tmp_path).restore(ddp)
    assert_same(state, run.state)
    assert beside["position"] == {"num_taken": 2}
    for directory in (tmp_path, tmp_path / "checkpoints"):
        with pytest.raises(ConfigError, match="belongs to a run of fit"):
            jddp.Checkpoints(directory).save(ddp, state)


def test_a_restore_finds_nothing_makes_nothing_and_leaves_alone_what_is_being_written(tmp_path):
    ddp, reader = wrapped(), wrapped()
    with pytest.raises(UsageError, match="Call init first"):
        jddp.Checkpoints(tmp_path).restore(reader)
    started(reader)
    assert jddp.Checkpoints(tmp_path / "a" / "b").restore(reader) is None
    assert not (tmp_path / "a").exists()
    saved = jddp.Checkpoints(tmp_path)
    saved.save(ddp, started(ddp))
    saved.wait()
    shutil.copytree(tmp_path / "0", tmp_path / "7.new")
    assert jddp.Checkpoints(tmp_path).restore(reader)[0].step == 0
    assert (tmp_path / "7.new").exists()


REFUSED = [
    ({"extra": {"seen": np.ones(2)}}, ConfigError, "extra= cannot be saved"),
    ({"keep": 0}, ConfigError, "keep is at least 1; got 0"),
    ({"directory": "s3://bucket/run"}, ConfigError, "is a URL"),
    ({"directory": "/dev/null/run"}, FileSystemError, "cannot be opened"),
    ({"directory": "there"}, ConfigError, "holds a checkpoint of step 0, and"),
]


def save_in(directory, ddp, state, *, extra=None, **options):
    jddp.Checkpoints(directory, **options).save(ddp, state, extra)


def test_a_save_that_cannot_be_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    earlier, ddp = wrapped(), wrapped(ConvNet())
    there = jddp.Checkpoints("there")
    there.save(earlier, started(earlier))
    there.wait()
    state = started(ddp)
    for given, error, reported in REFUSED:
        with refused(error, reported):
            save_in(**{"directory": "here", "ddp": ddp, "state": state} | given)
    with pytest.raises(ConfigError, match="step 0 is from another model"):
        jddp.Checkpoints("there").restore(ddp)


def test_a_state_that_is_older_taken_or_not_finite_is_not_saved(tmp_path):
    ddp = wrapped()
    first = started(ddp)
    old = copied(first)
    state, _ = take_steps(ddp, [make_batch()], first)
    saved = jddp.Checkpoints(tmp_path)
    saved.save(ddp, state)
    with pytest.raises(UsageError, match="This state was given to step call 1"):
        saved.save(ddp, first)
    with pytest.raises(ConfigError, match="this state of step 0 does not come"):
        saved.save(ddp, old)
    with pytest.raises(NumericsError, match="not finite after step 1"):
        saved.save(ddp, state.replace(params=jax.tree.map(jnp.log, state.params)))
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_a_save_that_fails_is_logged_and_raised_by_wait_and_the_next_is_tried(tmp_path, caplog):
    state = started(ddp := wrapped())
    saved = jddp.Checkpoints(tmp_path)
    saved.save(ddp, state)
    state, _ = take_steps(ddp, [make_batch()], state)
    (tmp_path / "1.new").write_text("in the way")
    saved.save(ddp, state)
    with pytest.raises(FileSystemError, match="step 1 cannot be saved"):
        saved.wait()
    assert "step 1 cannot be saved" in caplog.text
    state, _ = take_steps(ddp, [make_batch()], state)
    saved.save(ddp, state)
    saved.wait()
    assert saved.restore(ddp)[0].step == 2


@pytest.mark.parametrize(
    "rows, masked", swept([(1, False), (5, True), (8, False), (13, True)], every=2)
)
def test_a_padded_batch_is_one_device_on_its_rows(rows, masked):
    batch = make_batch(rows)
    if masked:
        batch["mask"] = np.arange(rows) % 3 != 1
    ddp, one = tiny.wrapped(mesh=4, accumulate_steps=2), tiny.wrapped(mesh=1)
    padded, full = ddp.pad(batch), ddp.pad(make_batch(8 if rows <= 8 else 16))
    assert jax.eval_shape(lambda: padded) == jax.eval_shape(lambda: full)
    got, want = (take_steps(*each) for each in ((ddp, [padded]), (one, [batch])))
    # Sums of at most 13 rows in another order.
    close((got[0].params, got[1]), (want[0].params, want[1]))


PADS = [
    (loss_fn, np.zeros(3), {}, ConfigError, "a dict of arrays; got ndarray"),
    (loss_fn, make_batch(3), {"num_rows": 5}, ConfigError, "do not divide"),
    (loss_fn, make_batch(3), {"num_rows": 2}, ConfigError, "more than num_rows=2"),
    (
        lambda *given: loss_fn(*given)[0].mean(),
        make_batch(3),
        {},
        UsageError,
        "'loss' is a scalar.*batches of 4 rows",
    ),
]


def test_a_batch_that_cannot_be_padded_is_refused():
    for loss, batch, given, error, reported in PADS:
        started(ddp := wrapped(loss=loss))
        with pytest.raises(error, match=reported):
            ddp.pad(batch, **given)


ENDS = """
import sys
import jddp, tiny
ddp = tiny.wrapped(mesh=1)
jddp.Checkpoints(sys.argv[1]).save(ddp, ddp.init(0, tiny.make_batch()))
raise KeyError("a mistake")
"""


@pytest.mark.processes
def test_a_process_that_ends_without_waiting_says_that_its_save_is_not_complete(tmp_path):
    ended = run_python("-c", ENDS, tmp_path)
    assert "KeyError: 'a mistake'" in ended.stderr
    is_complete = [x.name for x in tmp_path.iterdir()] == ["0"]
    assert is_complete != ("call wait()" in ended.stderr)
