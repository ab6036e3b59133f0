"""A description of arrays that was forged, with digests that hold: damage, in one line."""

import contextlib
import json
import shutil

import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from runs import write_sealed
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.checkpoint import reader
from jddp.checkpoint.arrays import from_file
from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.commands.checkpoint import main
from jddp.ground.errors import ConfigError, FileSystemError

KERNEL = "params/Dense_0/kernel"  # of shape (16, 16)
EMPTY = {"shape": [0], "dtype": "float32", "digest": "00000000", "layout": "replicated"}
# Changes of the kernel's entry.
ENTRIES = {
    "a negative dim": {"shape": [-16, 16]},
    "a dim that is no number": {"shape": [True, 256]},
    "a fraction": {"shape": [16.0, 16]},
    "another shape": {"shape": [8, 32]},
    "more than any memory": {"shape": [10**9, 10**9]},
    "no number of C": {"shape": [10**40, 0]},
    "many dims": {"shape": [1] * 100_000},
    "another dtype": {"dtype": "int32"},
    "objects": {"dtype": "object"},
    "a dtype of pointers": {"dtype": "O"},
    "a program's dtype": {"dtype": "{'names': ['a'], 'formats': ['O']}"},
    "a dtype of another form": {"dtype": "<f4"},
    "a key": {"dtype": "key<fry>"},
    "a huge array that is one on a device": {"shape": [2**50], "layout": {"sharded": [16, 16]}},
    "as many rows as replicas": {"shape": [2**50, 16, 16], "layout": {"per_replica": "mean"}},
    "rows that are not stored": {"shape": [4, 16, 16], "layout": {"per_replica": "mean"}},
    "a whole that is larger": {"layout": {"sharded": [2**40]}},
    "a layout without an end": {"layout": ["x" * 100_000]},
}
# Other names for the kernel, or of further arrays.
NAMES = ["../../../etc/passwd", "/etc/passwd", "params/../../x", "params/./x", "a\x1b[2J", "a\nb"]


@pytest.fixture(scope="module")
def ddp():
    return jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=1)


@pytest.fixture(scope="module")
def trained(ddp, tmp_path_factory):
    """A finished run; nobody changes it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    jddp.fit(ddp, [make_batch(8)] * 2, num_steps=2, run_dir=folder)
    return folder


@pytest.fixture
def forged(trained, tmp_path):
    """Puts another description into a copy of the run, and returns the copy."""
    described = json.loads((trained / "checkpoints" / "2" / "arrays.json").read_text())

    def forge(change):
        change(described)
        shutil.copytree(trained, tmp_path / "run")
        write_sealed(tmp_path / "run" / "checkpoints" / "2", "arrays.json", json.dumps(described))
        return tmp_path / "run"

    return forge


def refused(ddp, run, capsys):
    """How `verify` describes the damage; restoring and reading refuse it too, and read nothing."""
    assert main(["verify", str(run)]) == 74
    line, *_ = capsys.readouterr().out.split("\n")
    assert line.strip().startswith("2  ")
    assert len(line) < 500
    checkpoints = run / "checkpoints"
    with pytest.raises(FileSystemError, match=r"arrays\.json describes") as error:
        reader.read_newest(checkpoints, ["params"])
    assert "\n" not in str(error.value)
    opened = CheckpointFolder(checkpoints, keep=1)
    with (
        contextlib.closing(opened),
        pytest.raises(FileSystemError, match=r"arrays\.json describes"),
    ):
        opened.restore(ddp.init(0, make_batch(8)))
    return line


@pytest.mark.parametrize("change", ENTRIES.values(), ids=ENTRIES)
def test_an_entry_that_is_not_the_array_stored_is_damage(ddp, forged, capsys, monkeypatch, change):
    for handler in (ocp.PyTreeCheckpointHandler, ocp.StandardCheckpointHandler):
        monkeypatch.setattr(handler, "restore", None)
    run = forged(lambda described: described[KERNEL].update(change))
    refused(ddp, run, capsys)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_that_leads_elsewhere_or_writes_to_a_terminal_is_damage(
    ddp, forged, capsys, tmp_path, name
):
    line = refused(ddp, forged(lambda described: described.update({name: EMPTY})), capsys)
    assert "describes no arrays" in line
    assert line.isprintable()
    with (
        contextlib.closing(CheckpointFolder(tmp_path / "own", keep=1)) as opened,
        pytest.raises(ConfigError, match="an array of the state has the path"),
    ):
        opened.restore({name: jnp.ones(2)})


def test_an_array_that_is_left_out_or_is_not_there_is_damage(ddp, forged, capsys):
    assert KERNEL in refused(ddp, forged(lambda described: described.pop(KERNEL)), capsys)


def test_arrays_are_refused_that_all_together_are_more_than_the_memory():
    one = EMPTY | {"shape": [2**37], "dtype": "int8"}  # 128 GiB
    with pytest.raises(ValueError, match=r"they would need 1\.41e\+16 bytes"):
        from_file({f"params/{i}": one for i in range(102_400)})
