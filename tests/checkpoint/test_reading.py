"""Checkpoints that are read while the run that wrote them removes them."""

import contextlib
import json
import sys
import types

import optax
import pytest
from runs import write_sealed
from states import equal
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.checkpoint import reader, restore
from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.checkpoint.reader import newest_sound, read_newest
from jddp.commands.checkpoint import main as checkpoint_command
from jddp.ground.errors import FileSystemError


@pytest.fixture
def state():
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=1)
    return ddp.init(0, make_batch())


@pytest.fixture
def saved(tmp_path, state):
    """Checkpoints of steps 2 and 4."""
    with contextlib.closing(CheckpointFolder(tmp_path / "saved", keep=2)) as written:
        for step in (2, 4):
            written.save(step, state, {})
    return tmp_path / "saved"


def removing(monkeypatch, module, name, folder, run='{"step": 6}'):
    """Lets a function find that a run has removed the checkpoint, and named a newer one."""
    function = getattr(module, name)

    def late(*args, **options):
        if folder.exists():
            later = folder.rename(folder.with_name(run.rpartition(" ")[2].strip("}\n")))
            write_sealed(later, "run.json", run)
        return function(*args, **options)

    monkeypatch.setattr(module, name, late)


@pytest.mark.parametrize("name", ["read_described", "read_object", "read_arrays"])
def test_the_next_checkpoint_is_read_where_a_run_removes_one_as_it_is_read(
    saved, state, monkeypatch, caplog, capsys, name
):
    removing(monkeypatch, reader, name, saved / "4")
    equal(read_newest(saved, ["params"]), {"params": state.params})
    assert not (saved / "4").exists()
    assert not [x for x in caplog.records if x.name == "jddp"]
    removing(monkeypatch, reader, name, saved / "6", run='{"step": 7}')
    assert checkpoint_command(["export", str(saved), str(saved / "model.safetensors")]) == 0
    assert "step 7 is in" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["read_described", "read_object"])
def test_the_next_checkpoint_is_restored_where_a_run_removes_one(saved, state, monkeypatch, name):
    removing(monkeypatch, restore, name, saved / "4")
    with contextlib.closing(CheckpointFolder(saved, keep=1, is_written=False)) as found:
        assert found.restore(like=state).step == 6


def test_a_checkpoint_is_tried_once_if_it_stays_and_else_until_a_run_is_too_fast(saved):
    calls = []

    def read(folder):
        calls.append(folder)
        if len(calls) > 1:
            later = folder.rename(folder.with_name(str(int(folder.name) + 1)))
            write_sealed(later, "run.json", json.dumps({"step": int(later.name)}))
        raise FileSystemError("it is gone")

    for num_calls in (1, 1 + 1 + reader.TRIES):
        with pytest.raises(FileSystemError, match="it is gone"):
            reader.read_standing(lambda: saved / str(newest_sound(saved)), read)
        assert len(calls) == num_calls


def test_what_a_library_reports_to_a_loop_that_it_has_closed_is_not_printed(saved, capfd):
    read_newest(saved, ["params"])
    late = types.SimpleNamespace(object=None, exc_value=RuntimeError("Event loop is closed"))
    sys.unraisablehook(late)  # else a warning, and here an error
    assert capfd.readouterr().err == ""


def test_a_run_is_opened_while_it_removes_checkpoints(tmp_path, monkeypatch):
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=1)
    jddp.fit(ddp, [make_batch(8)] * 4, num_steps=4, run_dir=tmp_path)
    text = (tmp_path / "checkpoints/4/run.json").read_text().replace('"step": 4}', '"step": 6}')
    removing(monkeypatch, reader, "read_arrays", tmp_path / "checkpoints/4", text)
    assert jddp.open_run(tmp_path, model=MLP()).step == 6
    assert not (tmp_path / "checkpoints/4").exists()
