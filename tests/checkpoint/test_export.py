"""Checkpoints from the command line: listed, held against their digests, written into one file."""

import contextlib
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from judge import host
from runs import ROOT, write_sealed
from tiny import ConvNet, make_batch, wrapped

from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.checkpoint.reader import read_values
from jddp.checkpoint.weights import read_weights
from jddp.commands.checkpoint import main
from jddp.engine.mesh import make_mesh, replicate

BESIDE = {"position": {"num_taken": 3}, "evaluations": [{"step": 3, "loss": 0.25}]}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run directory with checkpoints of steps 1 and 3, and the state of the last."""
    optimizer = optax.chain(
        optax.scale_by_adam(mu_dtype=jnp.bfloat16), optax.add_noise(0.1, 0.5, 3)
    )
    ddp = wrapped(ConvNet(), optimizer, ema_decay=0.5)
    run_dir = tmp_path_factory.mktemp("run")
    checkpoints = CheckpointFolder(run_dir / "checkpoints", keep=2)
    state = ddp.init(0, make_batch())
    for step in (1, 2, 3):
        state, _ = ddp.step(state, make_batch(seed=step))
        if step != 2:
            checkpoints.save(step, state, {**BESIDE, "metrics": {"loss": 0.5}})
    checkpoints.close()
    return run_dir, state


@pytest.fixture
def run(original, tmp_path):
    return shutil.copytree(original[0], tmp_path / "run"), original[1]


def reported(capsys):
    return capsys.readouterr().out.splitlines()


def test_a_line_tells_each_checkpoint_those_that_were_set_aside_too(run, capsys):
    path, _ = run
    shutil.copytree(path / "checkpoints" / "1", path / "checkpoints" / "2.damaged")
    (path / "checkpoints" / "1" / "run.json").write_text("{")
    for where in (path, path / "checkpoints"):
        assert main(["list", str(where)]) == 0
        first, _, third = lines = reported(capsys)
        assert [line.split()[0] for line in lines] == ["1", "2.damaged", "3"]
        assert first.endswith("not readable")
        assert third.endswith("loss 0.25")
        assert max(map(len, lines)) <= 80


def test_every_file_and_every_array_is_held_against_its_digest(run, capsys):
    path, _ = run
    assert main(["verify", str(path)]) == 0
    assert [line.split(maxsplit=1) for line in reported(capsys)] == [
        [step, "all files and arrays are as they were saved"] for step in ("1", "3")
    ]
    described = json.loads((path / "checkpoints" / "1" / "arrays.json").read_text())
    described["opt_state/1/rng_key"]["digest"] = "00000000"
    write_sealed(path / "checkpoints" / "1", "arrays.json", json.dumps(described))
    (path / "checkpoints" / "3" / "state" / "_METADATA").unlink()
    assert main(["verify", str(path)]) == 74
    captured = capsys.readouterr()
    assert "opt_state/1/rng_key is not the array that was saved" in captured.out
    assert "state/_METADATA is missing" in captured.out
    assert captured.err.startswith("jddp: ")
    assert "2 damaged" in captured.err


def test_a_model_is_exported_for_other_programs(run, tmp_path, capsys):
    path, state = run
    assert main(["export", str(path), str(tmp_path / "x.safetensors")]) == 0
    assert "step 3 is in " in reported(capsys)[0]
    with safetensors.safe_open(tmp_path / "x.safetensors", "numpy") as opened:
        got = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    np.testing.assert_array_equal(got["params/Conv_0/kernel"], state.params["Conv_0"]["kernel"])
    fields = {"params", "ema_params", "model_state", "ema_state"}
    assert {name.split("/")[0] for name in got} == fields
    assert main(["export", str(path), str(tmp_path / "first.safetensors"), "--step", "1"]) == 0
    tree = read_weights(tmp_path / "first.safetensors")
    want = read_values(path / "checkpoints" / "1", ["params"])
    jax.tree.map(np.testing.assert_array_equal, tree["params"], want["params"])


def test_the_lines_of_a_page_load_an_export_into_plain_flax(run, tmp_path):
    file = tmp_path / "mine.safetensors"
    assert main(["export", str(run[0]), str(file)]) == 0
    page = (ROOT / "docs" / "fine_tuning.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (lines,) = [block for block in blocks if "def variables_in" in block]
    defined = {"safetensors": safetensors}
    exec(lines, defined)
    x, want = make_batch()["x"], {"params": run[1].params, **run[1].model_state}
    got, want = (ConvNet().apply(y, x, False) for y in (defined["variables_in"](file), host(want)))
    np.testing.assert_array_equal(got, want)


MISTAKES = (
    ("export run x.npz", 2, "unknown format. Use a name in .safetensors"),
    ("export run there.safetensors", 74, "cannot be written: File exists"),
    ("export run x.safetensors --step 2", 74, "cannot be read"),
    ("export narrow x.safetensors", 2, "int4"),
    ("list nowhere", 2, "nowhere holds no checkpoints. Name a run directory"),
)


def test_arrays_of_64_bits_are_exported_bitwise_identical(tmp_path):
    with (
        contextlib.closing(CheckpointFolder(tmp_path / "a", keep=1)) as saved,
        jax.enable_x64(True),
    ):
        saved.save(3, replicate({"params": {"x": np.array([1 / 3])}}, make_mesh(1)), {})
    assert main(["verify", str(tmp_path / "a")]) == 0
    assert main(["export", str(tmp_path / "a"), str(tmp_path / "x.safetensors")]) == 0
    assert read_weights(tmp_path / "x.safetensors")["params"]["x"].tolist() == [1 / 3]


def test_a_mistake_is_one_line(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.safetensors").write_bytes(b"")
    narrow = jax.device_put(jnp.ones(4, jnp.int4), run[1].step.sharding)
    checkpoints = CheckpointFolder(tmp_path / "narrow/checkpoints", keep=1)
    checkpoints.save(1, run[1].replace(params={"x": narrow}), {})
    checkpoints.close()
    assert read_weights(tmp_path / "narrow")["params"]["x"].dtype == jnp.int4  # as the message says
    before = sorted(tmp_path.rglob("*"))
    for arguments, code, message in MISTAKES:
        assert main(arguments.split()) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("jddp: ")
        assert message in line
        assert sorted(tmp_path.rglob("*")) == before
