"""A run of a config is evaluated and predicted with again, by commands and from Python."""

import csv
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import jddp
from jddp.__main__ import main
from jddp.config.files import dump_values
from jddp.config.schema import Config
from jddp.errors import ConfigError, UsageError
from jddp.job.job import fit

MINE = """
from flax import linen as nn

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x.reshape(len(x), -1))

def make(): return Net()

def loss(model, batch): return abs(model(batch["image"])).sum(-1)

def data(): return ({"image": [[1.0]] * 9},) * 2
"""


@pytest.fixture(scope="module")
def of_config(tmp_path_factory):
    """The folder of a run of a config, of its data, and of other rows."""
    folder, draw = tmp_path_factory.mktemp("config"), np.random.default_rng(0)
    for name, size in (("train", 20), ("test", 11), ("new", 13)):
        images = draw.normal(size=(size, 2, 2, 1)).astype(np.float32)
        (folder / "data").mkdir(exist_ok=True)
        np.savez(folder / "data" / name, image=images, label=draw.integers(0, 3, size))
    (folder / "mine.py").write_text(MINE)
    config = Config(
        data={"name": "npz", "dir": str(folder / "data"), "global_batch_size": 8},
        model={"name": "mlp", "kwargs": {"widths": [4]}},
        train={"num_steps": 3, "log_every_steps": 1},
        mesh={"num_devices": 2},
        run={"dir": str(folder / "run")},
    )
    return folder, fit(config)


@pytest.fixture
def here(of_config, tmp_path, monkeypatch):
    """A copy of that folder, in which commands are typed."""
    shutil.copytree(of_config[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    yield of_config[1]
    sys.modules.pop("mine", None)


def last_line(capsys):
    return capsys.readouterr().err.strip().removeprefix("jddp: ")


def test_a_run_of_a_config_is_evaluated_on_its_data_or_on_others(here, capsys):
    assert jddp.Run.open("run").evaluate() == pytest.approx(here.evaluate())
    assert jddp.Config(**jddp.Run.open("run").config).data.name == "npz"
    assert main(["evaluate", "run"]) == 0
    assert f"step 3  loss {here.eval_metrics['loss']:.6g}" in capsys.readouterr().out
    shutil.move("data/new.npz", "data/test.npz")
    assert main(["evaluate", "run", "--json", "data.dir=data", "data.global_batch_size=5"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["examples"] == 13
    assert record["loss"] != here.eval_metrics["loss"]
    for key in ("optimizer.learning_rate=1", "nothing"):
        assert main(["evaluate", "run", key]) == 2
        assert "an evaluation reads keys of data and loss" in last_line(capsys)


def test_rows_of_a_file_are_predicted_in_their_order(here, capsys):
    rows = dict(np.load("data/new.npz", allow_pickle=False))
    want = here.predict([rows])
    np.save("new.npy", rows["image"])
    for data, out in (("data/new.npz", "a.npz"), ("new.npy", "a.csv"), ("data/new.npz", "a.jsonl")):
        assert main(["predict", "run", "--data", data, "--out", out]) == 0
    assert "13 rows are predicted in a.jsonl" in capsys.readouterr().out
    with open("a.csv") as file:
        head, *lines = csv.reader(file)
    assert head == [f"predictions.{i}" for i in range(10)]
    read = [json.loads(line)["predictions"] for line in Path("a.jsonl").read_text().splitlines()]
    found = np.load("a.npz", allow_pickle=False)["predictions"]
    for got in (found, np.array(lines, np.float32), np.array(read, np.float32)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_mistakes_of_predict_are_one_line_with_a_code(here, capsys):
    image = np.ones((4, 2, 2, 1), np.float32)
    files = {"y": {"label": image}, "wide": {"image": image[:, :1]}, "pixels": {"image": image > 0}}
    for name, arrays in files.items():
        np.savez(name, **arrays)
    for data, out, code, reason in (
        ("y.npz", "a.csv", 65, "holds label, and no inputs"),
        ("wide.npz", "a.csv", 2, "Give rows of the shape"),
        ("pixels.npz", "a.csv", 65, "images are bool"),
        ("none.npz", "a.csv", 65, "no such file"),
        ("mine.py", "a.csv", 2, "rows are read from .npz and .npy"),
        ("data/new.npz", "a.txt", 2, "predictions are written to .npz, .csv, .jsonl"),
        ("data/new.npz", "no/a.csv", 74, "is no folder"),
    ):
        assert main(["predict", "run", "--data", data, "--out", out]) == code
        line = last_line(capsys)
        assert reason in line.splitlines()[0] == line
    assert main(["predict", "data", "--data", "data/new.npz", "--out", "a.csv"]) == 2
    assert "data is no run directory" in last_line(capsys)
    assert not list(Path().glob("a.*"))


def test_code_that_a_run_directory_names_is_imported_only_where_it_is_trusted(here, capsys):
    sections = {name: {"target": f"mine:{name}"} for name in ("loss", "data")}
    config = Config(**jddp.Run.open("run").config | sections)
    Path("run/config.yaml").write_text(dump_values(config.model_dump()))
    opened = jddp.Run.open("run")
    assert opened.predict([{"image": np.ones((3, 2, 2, 1), np.float32)}]).shape == (3, 10)
    with pytest.raises(UsageError, match="loss.target 'mine:loss', .* Give loss_fn=, or trust="):
        opened.evaluate([{"image": np.ones((3, 2, 2, 1), np.float32)}])
    with pytest.raises(UsageError, match="data.target 'mine:data', .* Give batches, or trust="):
        opened.evaluate()
    assert "mine" not in sys.modules
    assert main(["evaluate", "run"]) == 2
    with pytest.raises(ConfigError, match="trust='all' is unknown"):
        jddp.Run.open("run", trust="all")


def test_a_trusted_config_evaluates_its_own_code_or_names_what_is_gone(here, capsys):
    own = {"data": {"target": "mine:data", "global_batch_size": 4}, "run": {"dir": "own"}}
    own |= {"model": {"target": "mine:make"}, "loss": {"target": "mine:loss"}}
    fit(Config(train={"num_steps": 2}, mesh={"num_devices": 2}, **own))
    with pytest.raises(UsageError, match="is no Flax module class"):
        jddp.Run.open("own", trust="package")
    assert jddp.Run.open("own", trust="config").evaluate()["examples"] == 9
    assert main(["evaluate", "own", "--trust", "config", "data.target=mine:data"]) == 0
    Path("mine.py").unlink()
    sys.modules.pop("mine")
    assert main(["evaluate", "own", "--trust", "config"]) == 2
    assert "model.target: cannot import 'mine'" in last_line(capsys)
