"""Tables: columns by name, encoded by the training part, or refused where they do not fit."""

import csv

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import rows_of

import jddp
from jddp.__main__ import main
from jddp.config.schema import Config
from jddp.data import make_source
from jddp.data.examples import column_of
from jddp.data.source import rows_for_testing
from jddp.data.sources.table import Encoding, rows_in
from jddp.ground.errors import ConfigError, DataError
from jddp.trainer.job.build import train

TRAIN = {
    "area": [10.0, 20.0, 30.0, 40.0],
    "city": ["Rome", "Łódź", "Rome", ""],
    "rooms": [1, 2, 3, 2],
    "kind": ["dear", "cheap", "dear", "dear"],
    "price": [1.5, 2.0, 3.0, 4.0],
}
TEST = {name: column[:2] for name, column in TRAIN.items()}
INPUTS = {"inputs": ["area", "city"], "categorical": ["city"], "target": "kind"}


def write(path, columns):
    """A file of these columns, in the format of its ending."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
        return
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns.keys(), *zip(*columns.values(), strict=True)])


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "train.csv", TRAIN)
    write(tmp_path / "test.csv", TEST)
    return tmp_path


def source_in(folder, **kwargs):
    return make_source("table", directory=str(folder), kwargs=INPUTS | kwargs)


def train_rows(folder, **kwargs):
    return rows_of(source_in(folder, **kwargs).load().train)


def new_rows(path, columns, encoding):
    """New rows as `jddp predict` encodes them."""
    write(path, columns)
    return rows_of(rows_in(path, Encoding(**encoding)))


def test_numbers_are_normalized_and_categories_numbered_by_the_training_part(folder):
    source = source_in(folder)
    data = source.load()
    train, test = rows_of(data.train), rows_of(data.test)
    np.testing.assert_allclose(train["x"][:, 0], (np.array(TRAIN["area"]) - 25) / np.sqrt(125))
    np.testing.assert_array_equal(test["x"], train["x"][:2])  # not by their own mean
    assert train["categories"].tolist() == [[1], [2], [1], [0]]  # "", Rome, Łódź
    assert train["label"].tolist() == [1, 0, 1, 1]
    assert data.classes == ("cheap", "dear")
    assert {name: (x.shape[1:], x.dtype) for name, x in train.items()} == source.spec
    assert (source.sizes, source.num_categories) == ({"num_classes": 2}, [3])
    assert "2 classes" in data.description
    # In another order, and without a target.
    found = new_rows(folder / "new.csv", {"city": ["Rome"], "area": [20]}, data.encoding)
    assert {name: x.tolist() for name, x in found.items()} == {
        "x": train["x"][1:2].tolist(),
        "categories": [[1]],
    }


def test_parquet_gives_the_same_rows_as_csv(folder):
    (packed := folder / "packed").mkdir()
    write(packed / "train-0.parquet", TRAIN)
    write(packed / "test-0.parquet", TEST)
    expected, found = source_in(folder).load(), source_in(packed).load()
    for name, array in rows_of(expected.train).items():
        np.testing.assert_array_equal(rows_of(found.train)[name], array)
    assert found.sha256 == expected.sha256


def test_a_target_that_is_not_whole_is_a_number_and_text_or_whole_numbers_are_classes(folder):
    assert train_rows(folder, target="price")["y"].shape == (4, 1)
    assert source_in(folder, target="rooms").load().classes == ("1", "2", "3")
    found = train_rows(folder, target="rooms", task="regression")
    assert found["y"].tolist() == [[1], [2], [3], [2]]


def test_numbers_may_stay_as_they_are_and_columns_may_be_categories_alone(folder):
    assert train_rows(folder, normalize=False)["x"].tolist() == [[10], [20], [30], [40]]
    found = train_rows(folder, inputs=["city"])
    assert (found["x"].shape, found["categories"].shape) == ((4, 0), (4, 1))


@pytest.mark.parametrize("number", [0, 14.62])
def test_a_column_of_one_number_is_not_divided_by_zero_or_by_its_rounding(folder, number):
    rows = {name: column * 250 for name, column in TRAIN.items()}  # numpy's std is 4e-15 of 14.62
    write(folder / "train.csv", rows | {"area": [number] * 1000})
    write(folder / "test.csv", TEST | {"area": [number, number + 0.5]})
    data = source_in(folder).load()
    assert not rows_of(data.train)["x"].any()
    # One rounding of float64 in the difference, and one to float32.
    np.testing.assert_allclose(rows_of(data.test)["x"], [[0], [0.5]], rtol=1e-6)


@pytest.mark.parametrize("name", ["npz", "table"])
def test_each_source_holds_a_share_of_its_training_part_back(tmp_path, name):
    rows = {"x": np.arange(50.0), "label": np.arange(50) % 3}
    np.savez(tmp_path / "train.npz", **rows)
    write(tmp_path / "train.parquet", rows)
    of_table = {"inputs": ["x"], "target": "label", "normalize": False} if name == "table" else {}

    def parts(test_share):
        kwargs = {"test_share": test_share, **of_table}
        data = make_source(name, directory=str(tmp_path), kwargs=kwargs).load()
        return data.train, data.test

    is_test = rows_for_testing(50, 0.2)
    for part, rows in zip(parts(0.2), (~is_test, is_test), strict=True):
        np.testing.assert_array_equal(rows_of(part)["x"].reshape(-1), np.flatnonzero(rows))
        np.testing.assert_array_equal(column_of(part, "label"), np.flatnonzero(rows) % 3)
    for share, error in ((1.5, ConfigError), (1e-9, DataError)):
        with pytest.raises(error, match="test_share"):
            parts(share)


def test_an_unseen_category_may_have_a_number_of_its_own(folder):
    write(folder / "test.csv", TEST | {"city": ["Oslo", "Rome"]})
    source = source_in(folder, unseen="reserve")
    assert rows_of(source.load().test)["categories"].tolist() == [[3], [1]]
    assert source.num_categories == [4]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("test.csv", {"city": ["Rome", "Oslo"]}, "row 2 .* has 'Oslo' in column 'city'"),
        ("test.csv", {"area": [1, "two"]}, "row 2 .* has 'two' in column 'area'"),
        ("test.csv", {"area": ["", 2]}, "row 1 .* has '' in column 'area'"),
        ("test.csv", {"area": [1, "inf"]}, "row 2 .* has 'inf' in column 'area'"),
        ("test.csv", {"kind": ["dear", "free"]}, "row 2 .* has 'free' in column 'kind'"),
        ("train2.csv", {"area": [1, "x"]}, "row 2 .* has 'x' in column 'area'"),
    ],
)
def test_a_bad_entry_is_named_by_file_row_and_column(folder, file, change, message):
    write(folder / file, TEST | change)
    with pytest.raises(DataError, match=f"{file}: {message}") as error:
        source_in(folder)
    assert "\n" not in str(error.value)


def test_missing_numbers_may_be_the_mean_of_the_training_part(folder):
    write(folder / "train.csv", TRAIN | {"area": ["", 10, "NA", 30]})
    write(folder / "test.csv", TEST | {"area": ["", 50]})
    data = source_in(folder, normalize="fill_missing").load()
    np.testing.assert_allclose(rows_of(data.train)["x"][:, 0], [0, -1, 0, 1])
    np.testing.assert_allclose(rows_of(data.test)["x"][:, 0], [0, 3])
    new = {"area": [None, 10.0], "city": ["Rome", "Rome"]}
    found = new_rows(folder / "new.parquet", new, data.encoding)
    np.testing.assert_allclose(found["x"][:, 0], [0, -1])
    write(folder / "train.csv", TRAIN | {"area": [""] * 4})
    with pytest.raises(DataError, match="Such rows: 4"):
        source_in(folder, normalize="fill_missing")


def test_the_encodings_of_earlier_runs_are_read_and_equal_the_new_ones(folder):
    kept = {
        "means": {"area": 25.0},
        "stds": {"area": float(np.sqrt(125))},
        "categories": {"city": ["", "Rome", "Łódź"]},
        "reserves_unseen": False,
    }
    assert source_in(folder).load().encoding == kept
    assert Encoding(**kept).to_json() == kept


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (["dear", "", "dear", "cheap"], "kind"),
        (["1.5", "", "2.5", "3.5"], "price"),
        (["1", "NA", "0", "1"], "flag"),
    ],
)
def test_a_missing_target_is_refused_and_no_class_of_its_own(folder, kind, target):
    for part in ("train", "test"):
        write(folder / f"{part}.csv", TRAIN | {target: kind})
    with pytest.raises(DataError, match=f"row 2 .* in column '{target}'"):
        source_in(folder, target=target)


def test_columns_may_have_other_types_in_each_file(tmp_path):
    types = {"area": pa.array([1, 2], pa.int32()), "city": pa.nulls(2)}
    types["kind"] = pa.array(["dear", "cheap"]).dictionary_encode().cast("string")
    write(tmp_path / "train1.parquet", TEST | types)
    write(tmp_path / "train2.parquet", TRAIN)
    write(tmp_path / "test.parquet", TEST)
    found = train_rows(tmp_path, inputs=["area", "city", "rooms"])
    assert found["x"].shape == (6, 2)
    assert found["label"].tolist() == [1, 0, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"city": [[1], [2]]}, "column 'city' is text"),
        ({"area": np.array(["2020-01-01"] * 2, "datetime64[s]")}, "column 'area' is numbers"),
        ({"area": [*"ab"]}, "row 1 .* has 'a' in column 'area'"),
    ],
)
def test_types_that_are_no_text_or_no_numbers_are_refused_with_the_column(
    tmp_path, change, message
):
    for part in ("train", "test"):
        write(tmp_path / f"{part}.parquet", TEST | change)
    with pytest.raises(DataError, match=message):
        source_in(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("area,town,kind\n1,Rome,dear\n", "no column 'city'.*It has area, town, kind"),
        ("area,city,city,kind\n1,a,b,dear\n", "no column 'city', or more than one"),
        ("area,city,kind\n1,Rome\n", "not a whole CSV file"),
        ("area,city,kind\n", "no rows"),
        ("", "not a whole CSV file"),
    ],
)
def test_a_file_that_is_not_the_table_is_refused_in_one_line(folder, text, message):
    (folder / "train.csv").write_text(text)
    with pytest.raises(DataError, match=f"train.csv: {message}") as error:
        source_in(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"inputs": []}, "Name at least one column"),
        ({"inputs": ["area", "kind"]}, "not the target"),
        ({"categorical": ["rooms"]}, "'rooms' is no input"),
        ({"task": "ranking"}, "task"),
        ({"unseen": "drop"}, "unseen"),
        ({"normalize": "fill"}, "normalize"),
    ],
)
def test_an_argument_that_breaks_its_rule_is_refused(folder, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        source_in(folder, **kwargs)


KINDS = {"Rome": "warm", "Oslo": "cold", "Bari": "warm"}


def cities(num_rows, kinds=KINDS):
    rng = np.random.default_rng(num_rows)
    names = rng.choice([*kinds], num_rows)
    height = rng.normal(50, 9, num_rows)
    return {"height": height, "city": names, "kind": [*map(kinds.get, names)]}


@pytest.fixture
def heights(tmp_path):
    write(tmp_path / "train.csv", cities(64))
    write(tmp_path / "test.csv", cities(13))
    return tmp_path


def config(folder, num_devices=2, **model):
    columns = {"inputs": ["height", "city"], "categorical": ["city"], "target": "kind"}
    return Config(
        data={"name": "table", "dir": str(folder), "global_batch_size": 16, "kwargs": columns},
        model={"name": "tabular", "kwargs": {"widths": [8]}, **model},
        loss={"name": "cross_entropy"},
        optimizer={"learning_rate": 0.05},
        train={"num_steps": 40},
        mesh={"num_devices": num_devices},
        run={"dir": str(folder / f"run-{num_devices}")},
    )


@pytest.mark.slow
@pytest.mark.usefixtures("started_devices")
def test_two_devices_train_a_table_as_one_does_and_new_rows_are_predicted_by_name(heights, capsys):
    one, two = (train(config(heights, num)) for num in (1, 2))
    assert two.evaluate() == pytest.approx(one.evaluate(), rel=1e-4)
    assert two.evaluate()["accuracy"] == 1
    sizes = {"widths": [8], "num_classes": 2, "num_categories": [3]}
    assert two.config["model"]["kwargs"] == sizes
    new, out = heights / "new.csv", heights / "predictions.csv"
    command = ["predict", str(two.run_dir), "--data", str(new), "--out", str(out)]
    write(new, {"city": ["Rome", "Oslo"], "note": "ab", "height": [52, 49]})
    assert main(command) == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["label"] for row in rows] == ["warm", "cold"]
    # One of two classes has a column of its own, by which rows are ranked.
    assert float(rows[0]["probability.warm"]) > 0.5 > float(rows[1]["probability.warm"])
    out.unlink()
    write(new, {"city": ["Rome", "Paris"], "height": [52, 49]})
    assert main(command) == 65
    assert "new.csv: row 2 (from 1, after the names) has 'Paris'" in capsys.readouterr().err
    assert not out.exists()
    # The numbers of another training part would mean other cities.
    write(heights / "train.csv", cities(64, KINDS | {"Aosta": "cold"}))
    with pytest.raises(DataError, match="gives other means or categories"):
        jddp.open_run(two.run_dir).evaluate()


@pytest.mark.usefixtures("started_devices")
def test_a_model_without_an_argument_for_categories_is_refused(heights):
    with pytest.raises(ConfigError, match=r"no argument 'categories'.*model\.name=tabular"):
        train(config(heights, name="mlp", kwargs={}))
