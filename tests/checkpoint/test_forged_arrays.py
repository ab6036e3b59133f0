"""A description of arrays that was forged, with digests that hold: damage, in one line."""

import contextlib
import json
import shutil

import optax
import pytest
from runs import write_sealed
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.commands.checkpoint import main
from jddp.ground.errors import Error

KERNEL = "params/Dense_0/kernel"  # of shape (16, 16)
ONE = {"shape": [1], "dtype": "float32", "digest": "00000000", "layout": "replicated"}
ENTRIES = {
    "another shape": {KERNEL: {"shape": [8, 32]}},
    "more than any memory": {KERNEL: {"shape": [10**9, 10**9]}},
    "another dtype": {KERNEL: {"dtype": "int32"}},
    "a dtype of pointers": {KERNEL: {"dtype": "O"}},
    "rows that are not stored": {KERNEL: {"shape": [4, 16, 16], "layout": {"per_replica": "mean"}}},
    "no layout": {KERNEL: {"layout": ["x" * 100_000]}},
    "a name that leads elsewhere": {"../../../etc/passwd": ONE},
    "a name that writes to a terminal": {"a\x1b[2J\nb": ONE},
}


@pytest.fixture(scope="module")
def ddp():
    return jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=1)


@pytest.fixture(scope="module")
def trained(ddp, tmp_path_factory):
    """A finished run; nobody changes it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    jddp.fit(ddp, [make_batch(8)] * 2, num_steps=2, run_dir=folder)
    return folder


@pytest.mark.parametrize("changes", ENTRIES.values(), ids=ENTRIES)
def test_a_description_that_is_not_of_the_arrays_stored_is_refused(
    ddp, trained, tmp_path, capsys, changes
):
    run = shutil.copytree(trained, tmp_path / "run")
    described = json.loads((run / "checkpoints/2/arrays.json").read_text())
    for name, entry in changes.items():
        described[name] = described.get(name, {}) | entry
    write_sealed(run / "checkpoints/2", "arrays.json", json.dumps(described))
    assert main(["verify", str(run)]) == 74
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("           2  ")
    assert all(line.isprintable() for line in lines)
    opened = CheckpointFolder(run / "checkpoints", keep=1)
    with contextlib.closing(opened), pytest.raises(Error):
        opened.restore(ddp.init(0, make_batch(8)))
