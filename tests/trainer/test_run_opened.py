"""A run that has ended is opened, evaluated and predicted with, by commands and from Python."""

import csv
import json
import os
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from runs import ROOT, refused
from sweeps import swept
from tiny import MLP, ConvNet, NnxConvNet, loss_fn, make_batch, make_batches, wrapped

import jddp
from jddp.__main__ import main
from jddp.config.files import dump_values
from jddp.config.schema import Config
from jddp.ground.errors import ConfigError, FileSystemError, UsageError
from jddp.trainer.job.build import train
from jddp.trainer.runs.predictions import predict_file
from jddp.trainer.watching import KeepBest

OTHER = [make_batch(13, seed=9)]  # two rows more than eight devices have


@pytest.fixture(scope="module", params=["linen", "nnx"])
def of_objects(request, tmp_path_factory):
    """A run of `jddp.fit` whose replicas have their own statistics, and its model."""
    model = ConvNet() if request.param == "linen" else NnxConvNet(nnx.Rngs(0))
    ddp = wrapped(model, batch_norm="local", ema_decay=0.5)
    plan = {"num_steps": 4, "evaluate": jddp.Evaluation(OTHER, "ema"), "eval_every_steps": 2}
    plan |= {"run_dir": tmp_path_factory.mktemp("objects") / "run", "save_every_steps": 2}
    return jddp.fit(ddp, make_batches(4), **plan, callbacks=[KeepBest("loss", mode="min")]), model


@pytest.mark.parametrize("num_devices", swept([1, 2, 8], every=3))
def test_an_opened_run_is_the_run_that_was_trained(of_objects, num_devices):
    run, model = of_objects
    opened = jddp.open_run(run.run_dir, model=model, loss_fn=loss_fn, mesh=num_devices)
    assert opened.evaluate(OTHER) == pytest.approx(run.evaluate())
    np.testing.assert_allclose(opened.predict(OTHER), run.predict(), rtol=1e-5, atol=1e-6)
    for name in ("step", "history", "evaluations", "config", "checkpoints", "stopped"):
        assert getattr(opened, name) == getattr(run, name), name
    assert opened.eval_metrics == run.eval_metrics
    assert len(opened.plot().axes) == 2
    loaded, x = jddp.open_run(run.run_dir, model=model).model, make_batch(8)["x"]
    for found in (run.model, opened.model):
        options = {"train": False} if isinstance(model, ConvNet) else {}
        np.testing.assert_allclose(found(x, **options), loaded(x, **options), rtol=1e-6)


def test_any_checkpoint_is_opened_with_either_parameters(of_objects):
    run, model = of_objects

    def losses(**chosen):
        opened = jddp.open_run(run.run_dir, model=model, loss_fn=loss_fn, **chosen)
        return opened.step, opened.evaluate(OTHER)["loss"]

    best = min(run.evaluations, key=lambda record: record["loss"])
    assert losses(checkpoint=2) == pytest.approx((2, run.evaluations[0]["loss"]))
    assert losses(checkpoint="best") == pytest.approx((best["step"], best["loss"]))
    assert losses(checkpoint=run.checkpoints[0]) == losses(checkpoint="best")
    plain = run._ddp.evaluate(run.state, OTHER, "params")["loss"]
    assert losses(params="params") == pytest.approx((4, plain))
    message = r"checkpoints holds no step 3. Choose one of \[2, 4\]"
    with pytest.raises(FileSystemError, match=message):
        losses(checkpoint=3)
    with pytest.raises(ConfigError, match="params 'mean' is unknown"):
        losses(params="mean")


def test_what_a_run_of_objects_does_not_keep_is_asked_for(of_objects):
    run, model = of_objects
    opened = jddp.open_run(run.run_dir, model=model)
    for message, call in (
        ("Give model=", lambda: jddp.open_run(run.run_dir)),
        ("does not save its loss. Give loss_fn=", lambda: opened.evaluate(OTHER)),
        ("has no evaluation batches", opened.evaluate),
        ("is read-only", opened.save),
        ("is no run directory", lambda: jddp.open_run(run.run_dir / "logs")),
    ):
        with pytest.raises(UsageError, match=message):
            call()


def test_another_model_and_other_rows_are_refused_in_one_line(of_objects):
    run, model = of_objects
    with refused(ConfigError, "do not fit"):
        jddp.open_run(run.run_dir, model=MLP(), loss_fn=loss_fn).evaluate(OTHER)
    if isinstance(model, ConvNet):
        with pytest.raises(ConfigError, match="does not fit the model NnxConvNet.* at 10 places"):
            jddp.open_run(run.run_dir, model=NnxConvNet(nnx.Rngs(0)))
    opened = jddp.open_run(run.run_dir, model=model)
    with pytest.raises(ConfigError, match="rows of the shape and dtype"):
        opened.predict([{"x": np.ones((8, 5), np.float32)}])
    with pytest.raises(ConfigError, match="holds y, of which none"):
        opened.predict([{"y": OTHER[0]["y"]}])


OWN = {"data": {"target": "mine:points", "global_batch_size": 4}, "run": {"dir": "own"}}
OWN |= {"train": {"num_steps": 2}, "mesh": {"num_devices": 2}}
OWN |= {"model": {"target": "mine:make"}, "loss": {"target": "mine:absolute_error"}}


def train_mlp(run_dir, num_steps, **data):
    config = Config(
        data={"global_batch_size": 8, **data},
        model={"name": "mlp", "kwargs": {"widths": [4]}},
        train={"num_steps": num_steps, "log_every_steps": 1},
        mesh={"num_devices": 2},
        run={"dir": str(run_dir)},
    )
    return train(config)


@pytest.fixture(scope="module")
def of_config(tmp_path_factory):
    """The folder of a run of a config, of its data, and of other rows."""
    folder, draw = tmp_path_factory.mktemp("config"), np.random.default_rng(0)
    for name, size in (("train", 20), ("test", 11), ("new", 13)):
        images = draw.normal(size=(size, 2, 2, 1)).astype(np.float32)
        (folder / "data").mkdir(exist_ok=True)
        np.savez(folder / "data" / name, image=images, label=draw.integers(0, 3, size))
    shutil.copy(ROOT / "tests" / "workers" / "mine.py", folder)
    return folder, train_mlp(folder / "run", 3, name="npz", dir=str(folder / "data"))


@pytest.fixture
def here(of_config, tmp_path, monkeypatch):
    """A copy of that folder, in which commands are typed."""
    shutil.copytree(of_config[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    yield of_config[1]
    sys.modules.pop("mine", None)


def test_a_run_of_a_config_is_evaluated_on_its_data_or_on_others(here, capsys):
    assert jddp.open_run("run").evaluate() == pytest.approx(here.evaluate())
    assert jddp.Config(**jddp.open_run("run").config).data.name == "npz"
    assert main(["evaluate", "run"]) == 0
    assert f"step 3  loss {here.eval_metrics['loss']:.6g}" in capsys.readouterr().out
    shutil.move("data/new.npz", "data/test.npz")
    assert main(["evaluate", "run", "--json", "data.dir=data", "data.global_batch_size=5"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["examples"] == 13
    assert record["loss"] != here.eval_metrics["loss"]
    for key in ("optimizer.learning_rate=1", "nothing"):
        assert main(["evaluate", "run", key]) == 2
        assert "an evaluation reads only the keys of data and loss" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["evaluate run", "predict run --data data/new.npz --out a.npz"])
def test_commands_leave_the_memory_of_gpus_to_a_run_that_may_still_train(here, given, monkeypatch):
    monkeypatch.delitem(os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    assert main(given.split()) == 0
    assert os.environ.pop("XLA_PYTHON_CLIENT_PREALLOCATE") == "false"


def test_metrics_that_are_arrays_are_arrays_in_text_and_lists_in_json_and_in_records(here, capsys):
    """A run with a confusion matrix, as docs/data.md has it."""
    own = {"model": {"target": "mine:Line"}, "loss": {"target": "mine:table"}}
    run = train(Config(**OWN | own))
    tables = ["confusion", "[[7. 7.]", " [7. 7.]]", "recall", "[ 1. nan]"]
    assert "\n".join(tables) in capsys.readouterr().out
    assert "confusion 2 x 2, recall 2" in repr(run)
    assert main(["evaluate", "own", "--trust", "config"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("step 2  loss ")
    assert rest == tables
    assert main(["evaluate", "own", "--trust", "config", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (record,) = jddp.open_run("own", trust="config").evaluations
    for found in (printed, record):
        assert (found["confusion"], found["recall"]) == ([[7, 7], [7, 7]], [1.0, None])


def test_rows_of_a_file_are_predicted_in_their_order(here, capsys):
    rows = dict(np.load("data/new.npz", allow_pickle=False))
    want = here.predict([rows])
    np.save("new.npy", rows["image"])
    for data, out in (("data/new.npz", "a.npz"), ("new.npy", "a.csv")):
        assert main(["predict", "run", "--data", data, "--out", out]) == 0
    assert "predictions for 13 rows are in a.csv" in capsys.readouterr().out
    with open("a.csv") as file:
        head, *lines = csv.reader(file)
    labels = [line.pop(0) for line in lines]
    probabilities = [[line.pop(0) for _ in range(10)] for line in lines]
    names = [f"probability.{i}" for i in range(10)]
    assert head == ["label", *names, *(f"predictions.{i}" for i in range(10))]
    assert [int(x) for x in labels] == want.argmax(-1).tolist()
    arrays = dict(np.load("a.npz", allow_pickle=False))
    for got in (np.array(probabilities, np.float32), np.stack([arrays[x] for x in names], 1)):
        np.testing.assert_allclose(got, jax.nn.softmax(want), rtol=1e-5)
    for got in (arrays["predictions"], np.array(lines, np.float32)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by", ["the data", "the config"])
def test_images_of_bytes_are_normalized_for_predict_as_in_training(by, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (16, 4, 4, 1)).astype(np.uint8)
    labels, scale = np.arange(16) % 2, {"mean": 0.25, "std": 0.5}
    for part in ("train", "test"):
        np.savez(tmp_path / part, image=images, label=labels)
        np.save(tmp_path / f"{part}_images.npy", images)
        np.save(tmp_path / f"{part}_labels.npy", labels)
    data = {"name": "npz", "transforms": [{"name": "normalize", "kwargs": scale}]}
    if by == "the data":
        kwargs = {"num_classes": 2, "image_size": 4, "num_channels": 1, **scale}
        data = {"name": "npy", "kwargs": kwargs}
    run = train_mlp(tmp_path / "run", 1, dir=str(tmp_path), **data)
    scaled = (images[:11].astype(np.float32) / 255 - 0.25) / 0.5
    want = run.predict([{"image": scaled}])
    white = images[:11].astype(np.uint16) * 257  # 65,535 is white
    for rows in (images[:11], scaled, white):
        np.save(tmp_path / "new.npy", rows)
        assert predict_file(tmp_path / "run", tmp_path / "new.npy", tmp_path / "out.npz") == 11
        found = np.load(tmp_path / "out.npz", allow_pickle=False)["predictions"]
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def test_mistakes_of_predict_are_one_line_with_a_code(here, capsys):
    image = np.ones((4, 2, 2, 1), np.float32)
    files = {"y": {"label": image}, "wide": {"image": image[:, :1]}, "pixels": {"image": image > 0}}
    for name, arrays in files.items():
        np.savez(name, **arrays)
    for data, out, code, reason in (
        ("y.npz", "a.csv", 65, "holds label, but no inputs"),
        ("wide.npz", "a.csv", 2, "rows of the shape"),
        ("pixels.npz", "a.csv", 65, "images are bool"),
        ("none.npz", "a.csv", 65, "no such file"),
        ("mine.py", "a.csv", 2, "rows are read from .npz and .npy"),
        ("data/new.npz", "a.txt", 2, "predictions are written to .npz, .csv"),
        ("data/new.npz", "no/a.csv", 74, "does not exist"),
    ):
        assert main(["predict", "run", "--data", data, "--out", out]) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert reason in line
    assert main(["predict", "data", "--data", "data/new.npz", "--out", "a.csv"]) == 2
    assert "data is no run directory" in capsys.readouterr().err
    assert not list(Path().glob("a.*"))


def test_code_that_a_run_directory_names_is_imported_only_where_it_is_trusted(here, capsys):
    config = Config(**jddp.open_run("run").config | {name: OWN[name] for name in ("loss", "data")})
    Path("run/config.yaml").write_text(dump_values(config.model_dump()))
    opened, rows = jddp.open_run("run"), [{"image": np.ones((3, 2, 2, 1), np.float32)}]
    assert opened.predict(rows).shape == (3, 10)
    with pytest.raises(UsageError, match="loss.target 'mine:abs.* Give loss_fn=; or trust="):
        opened.evaluate(rows)
    with pytest.raises(UsageError, match="data.target 'mine:points', .* Give batches; or trust="):
        opened.evaluate()
    assert "mine" not in sys.modules
    assert main(["evaluate", "run"]) == 2
    with pytest.raises(ConfigError, match="trust 'all' is unknown"):
        jddp.open_run("run", trust="all")


def test_a_trusted_config_evaluates_its_own_code_or_names_what_is_gone(here, capsys):
    train(Config(**OWN))
    assert main(["evaluate", "own"]) == 2
    said = capsys.readouterr().err
    assert "--trust package" in said
    assert "model=" not in said
    with pytest.raises(UsageError, match="is no Flax module class"):
        jddp.open_run("own", trust="package")
    assert jddp.open_run("own", trust="config").evaluate()["examples"] == 7
    assert main(["evaluate", "own", "--trust", "config", "data.target=mine:points"]) == 0
    Path("mine.py").unlink()
    sys.modules.pop("mine")
    assert main(["evaluate", "own", "--trust", "config"]) == 2
    assert "model.target: cannot import 'mine'" in capsys.readouterr().err
