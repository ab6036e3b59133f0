"""The examples of any step are found from the directory of its run."""

import json

import numpy as np
import optax
import pytest
from PIL import Image
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.commands.data import main
from jddp.config.files import load_config
from jddp.data.transforms import as_stored
from jddp.ground.errors import ConfigError, DataError, ExitCode, UsageError
from jddp.trainer.job.build import build
from jddp.trainer.runs.predictions import rows_of_step

pytestmark = pytest.mark.usefixtures("started_devices")
SMALL = {"model": {"name": "mlp"}, "mesh": {"num_devices": 2}}
SMALL |= {"train": {"num_steps": 6, "eval_every_steps": None}}


def train(directory, **more):
    return jddp.train("fashion_mnist_cnn", **(SMALL | {"run": {"dir": str(directory)}} | more))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "one"
    train(directory)
    return directory


@pytest.mark.slow
def test_the_examples_of_a_step_are_those_of_its_batch_in_their_order(trained):
    config, _ = load_config([str(trained / "config.yaml")], ["data.transforms=[]"])
    job = build(config)
    stored, _ = as_stored(job.data.train)
    for step, batch in zip(range(1, 7), job.train_batches(), strict=False):
        rows = rows_of_step(trained, step)
        found = stored.take(np.array(rows.examples))
        np.testing.assert_array_equal(found["image"], batch["image"])
        assert rows.epoch == (step - 1) * 256 / 15_000
        assert rows.names == ()


def test_a_run_that_continues_another_counts_from_where_that_one_was(trained, tmp_path):
    more = {"train": SMALL["train"] | {"num_steps": 9}, "data": {"global_batch_size": 128}}
    train(tmp_path / "two", checkpoint={"start_from": str(trained)}, **more)
    for step in (7, 9):
        begins_at = 6 * 256 + (step - 7) * 128
        assert rows_of_step(tmp_path / "two", step).epoch == begins_at / 15_000


def test_examples_that_are_files_are_named(tmp_path, capsys):
    names = [
        f"{side}/{kind}/{i}.png" for side in ("train", "test") for kind in "ab" for i in (1, 2)
    ]
    for name in names:
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 100, np.uint8)).save(path)
    data = {"name": "image_folder", "dir": str(tmp_path / "images"), "global_batch_size": 4}
    data |= {"kwargs": {"image_size": 8}}
    train(tmp_path / "run", data=data)
    rows = rows_of_step(tmp_path / "run", 2)
    assert sorted(rows.names) == ["a/1.png", "a/2.png", "b/1.png", "b/2.png"]
    assert main(["rows", str(tmp_path / "run"), "--step", "2"]) == ExitCode.DONE
    first, head, *lines = capsys.readouterr().out.splitlines()[-6:]
    assert first == "step 2: 4 examples, from epoch 1.000 on"
    assert head.split() == ["row", "example"]
    assert [line.split()[2] for line in lines] == [*rows.names]
    assert main(["rows", str(tmp_path / "run"), "--step", "2", "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["examples"] == [*rows.examples]


def test_a_step_that_the_run_does_not_have_is_one_line(trained, capsys):
    for step in ("0", "7"):
        assert main(["rows", str(trained), "--step", step]) == ExitCode.USAGE
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"jddp: --step {step}: the steps of this run are 1 to 6."


def test_other_data_code_that_is_not_trusted_and_runs_without_a_config_are_refused(
    trained, tmp_path
):
    copy = tmp_path / "copy"
    copy.mkdir()
    config = (trained / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config)
    (copy / "manifest.json").write_text(json.dumps({"data": {"sha256": "0" * 64}}))
    with pytest.raises(DataError, match=r"changed since the run began \(sha256 000000000000, now"):
        rows_of_step(copy, 1)
    (copy / "config.yaml").write_text(
        config.replace("name: fashion_mnist\n  target: null", "name: null\n  target: mine:data")
    )
    with pytest.raises(UsageError, match=r"data.target 'mine:data', which the run directory names"):
        rows_of_step(copy, 1)
    jddp.fit(
        jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=2),
        [make_batch()] * 2,
        num_steps=1,
        run_dir=tmp_path / "objects",
        save_every_steps=1,
    )
    with pytest.raises(UsageError, match="saves no config: ask its batches"):
        rows_of_step(tmp_path / "objects", 1)
    with pytest.raises(ConfigError, match="trust"):
        rows_of_step(trained, 1, trust="everything")
