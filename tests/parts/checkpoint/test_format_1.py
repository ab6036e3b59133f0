"""Whole run directories that earlier formats left behind resume, load, verify and export."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy
import yaml

import jddp
from jddp.checkpoint.__main__ import main as look_after
from jddp.config.files import flatten, load_config
from jddp.config.format_1 import renamed_run
from jddp.config.schema import Config
from jddp.train import main
from jddp.trainer.reports.run_directory import RunDirectory

KEPT = Path(__file__).parent / "kept"
ROUNDING = {"rtol": 1e-4}  # of a few steps in float32, on another processor


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A copy of the kept folder, which is the working directory."""
    assert jax.device_count() == 8  # JAX runs: a config can no longer change the devices there are.
    folder = shutil.copytree(KEPT / "format_1", tmp_path / "kept")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    return folder


def records(run, split):
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


# What the code that wrote them made of them.
AFTER_TWO_MORE_STEPS = {("statistics", 4): 1.263566, ("local_steps", 1): 1.276428}


@pytest.mark.parametrize("run, num_devices", AFTER_TWO_MORE_STEPS)
def test_it_resumes_on_any_number_of_devices(folder, run, num_devices, capsys):
    options = ["train.num_steps=5", f"mesh.num_devices={num_devices}"]
    assert main(["--config", f"{run}/config.yaml", *options]) == 0
    assert [record["step"] for record in records(run, "train")] == [1, 2, 3, 4, 5]
    *_, last = records(run, "eval")
    np.testing.assert_allclose(last["loss"], AFTER_TWO_MORE_STEPS[run, num_devices], **ROUNDING)
    assert look_after(["verify", run]) == 0
    reported = capsys.readouterr().out
    assert "changed: train.num_steps 3 -> 5" in reported
    assert "logical_replicas" not in reported


# Each key under its old and its new name, with a value other than the default.
RENAMED = [
    ("data.weights", "a.npy", "data.sample_weights", "a.npy"),
    ("ddp.num_shards", 8, "ddp.logical_replicas", 8),
    ("ddp.placement", "ready", "ddp.overlap", True),
    ("ddp.placement", "end", "ddp.overlap", False),
    ("model.weights", "b.msgpack", "model.init_from", "b.msgpack"),
    ("train.compare_every_steps", 7, "train.check_replicas_every_steps", 7),
]


@pytest.mark.parametrize("was, before, now, after", RENAMED)
def test_a_renamed_key_is_read_from_its_run_directory_alone(folder, was, before, now, after):
    path = folder / "statistics" / "config.yaml"
    values = yaml.safe_load(path.read_text())
    section, key = was.split(".")
    assert key in values[section]
    values[section][key] = before
    path.write_text(yaml.safe_dump(values))
    config, _ = load_config([str(path)])
    found = config.model_dump()
    assert flatten(found)[now] == after
    files = RunDirectory(path.parent, is_writer=True)
    files.prepare(found, {})
    with files.held(found):
        pass
    assert was in flatten(yaml.safe_load(path.read_text()))  # nothing has changed
    shutil.copy(path, folder)
    with pytest.raises(jddp.ConfigError, match=f"unknown key '{was}'"):
        load_config([str(folder / "config.yaml")])


def test_run_json_is_read_under_the_names_of_today(folder):
    (path,) = folder.glob("statistics/checkpoints/*/run.json")
    beside = json.loads(path.read_text())
    found = renamed_run(beside)
    assert found["plan"]["check_replicas_every_steps"] == 500
    assert found["world"]["logical_replicas"] is None
    assert Config(**found["config"]).ddp.overlap == "auto"
    assert renamed_run(found) == found


@pytest.mark.parametrize("run", ["statistics", "local_steps"])
def test_its_model_loads_as_it_was_evaluated_and_its_arrays_are_verified_exported_and_imported(
    folder, run
):
    model, (evaluated,) = jddp.load(run), records(run, "eval")
    with np.load("data/test.npz") as test:
        logits, labels = model(test["image"]), test["label"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    np.testing.assert_allclose(losses.mean(), evaluated["loss"], **ROUNDING)
    assert look_after(["verify", run]) == 0
    assert look_after(["export", run, "model.safetensors"]) == 0
    exported = safetensors.numpy.load_file("model.safetensors")
    field = "ema_params" if run == "local_steps" else "params"
    for path, x in jax.tree_util.tree_leaves_with_path(model.variables["params"]):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        np.testing.assert_allclose(exported[f"{field}/{name}"], x, rtol=1e-6)
    assert look_after(["export", run, "all.safetensors", "--all"]) == 0
    shutil.rmtree(Path(run, "checkpoints"))
    assert look_after(["import", "all.safetensors", f"{run}/checkpoints"]) == 0
    assert look_after(["verify", run]) == 0
    assert main(["--config", f"{run}/config.yaml", "train.num_steps=4"]) == 0
