"""Tables: trained from a CSV file, evaluated, and predicted with from another."""

import csv

import numpy as np
import pytest

import jddp
from jddp.__main__ import main
from jddp.config.schema import Config
from jddp.ground.errors import ConfigError, DataError
from jddp.trainer.job.build import train

pytestmark = pytest.mark.usefixtures("started_devices")

KINDS = {"Rome": "warm", "Oslo": "cold", "Bari": "warm"}


def write(path, num_rows, kinds=KINDS):
    rng = np.random.default_rng(num_rows)
    cities = rng.choice([*kinds], num_rows)
    rows = zip(rng.normal(50, 9, num_rows), cities, map(kinds.get, cities), strict=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("height", "city", "kind"), *rows])


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "train.csv", 64)
    write(tmp_path / "test.csv", 13)
    return tmp_path


def config(folder, num_devices=2, **sections):
    columns = {"inputs": ["height", "city"], "categorical": ["city"], "target": "kind"}
    data = {"name": "table", "dir": str(folder), "global_batch_size": 16, "kwargs": columns}
    return Config(
        data=data,
        model={"name": "tabular", "kwargs": {"widths": [8]}, **sections.get("model", {})},
        loss={"name": "cross_entropy", **sections.get("loss", {})},
        optimizer={"learning_rate": 0.05},
        train={"num_steps": 40},
        mesh={"num_devices": num_devices},
        run={"dir": str(folder / f"run-{num_devices}")},
    )


@pytest.mark.slow
def test_two_devices_train_a_table_as_one_does_and_new_rows_are_predicted_by_name(folder, capsys):
    one, two = (train(config(folder, num)) for num in (1, 2))
    assert two.evaluate() == pytest.approx(one.evaluate(), rel=1e-4)
    assert two.evaluate()["accuracy"] == 1
    assert two.config["model"]["kwargs"] == {
        "widths": [8],
        "num_classes": 2,
        "num_categories": [3],
    }
    new, out = folder / "new.csv", folder / "predictions.csv"
    new.write_text("city,note,height\nRome,a,52\nOslo,b,49\n")
    command = ["predict", str(two.run_dir), "--data", str(new), "--out", str(out)]
    assert main(command) == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["label"] for row in rows] == ["warm", "cold"]
    # One of two classes has a column of its own, by which rows are ranked.
    assert float(rows[0]["probability.warm"]) > 0.5 > float(rows[1]["probability.warm"])
    assert float(rows[1]["probability.cold"]) > 0.5

    out.unlink()
    new.write_text("city,height\nRome,52\nParis,49\n")
    assert main(command) == 65
    assert "new.csv: row 2 (from 1, after the names) has 'Paris'" in capsys.readouterr().err
    assert not out.exists()

    # The numbers of another training part would mean other cities.
    write(folder / "train.csv", 64, KINDS | {"Aosta": "cold"})
    with pytest.raises(DataError, match="gives other means or categories"):
        jddp.open_run(two.run_dir).evaluate()


def test_a_model_without_an_argument_for_categories_is_refused(folder):
    with pytest.raises(ConfigError, match="no argument 'categories'.*model.name=tabular"):
        train(config(folder, model={"name": "mlp", "kwargs": {}}))
