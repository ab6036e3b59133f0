"""Tables: columns by name, encoded by the training part, refused where they do not fit."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jddp.data import make_source
from jddp.data.examples import column_of
from jddp.data.source import rows_for_testing
from jddp.data.sources.table import Encoding, rows_in
from jddp.ground.errors import ConfigError, DataError

TRAIN = {
    "area": [10.0, 20.0, 30.0, 40.0],
    "city": ["Rome", "Łódź", "Rome", ""],
    "rooms": [1, 2, 3, 2],
    "kind": ["dear", "cheap", "dear", "dear"],
    "price": [1.5, 2.0, 3.0, 4.0],
}
TEST = {name: column[:2] for name, column in TRAIN.items()}
INPUTS = {"inputs": ["area", "city"], "categorical": ["city"], "target": "kind"}


def as_csv(columns):
    rows = [columns.keys(), *zip(*columns.values(), strict=True)]
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path):
    for part, columns in (("train", TRAIN), ("test", TEST)):
        (tmp_path / f"{part}.csv").write_text(as_csv(columns))
    return tmp_path


def source_in(folder, **kwargs):
    return make_source("table", directory=str(folder), kwargs=INPUTS | kwargs)


def rows_of(examples):
    return examples.take(np.arange(len(examples)))


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


def test_parquet_gives_the_same_rows_as_csv(folder, tmp_path):
    packed = tmp_path / "packed"
    packed.mkdir()
    for part, columns in (("train", TRAIN), ("test", TEST)):
        pq.write_table(pa.table(columns), packed / f"{part}-0.parquet")
    expected, found = source_in(folder).load(), source_in(packed).load()
    for name, array in rows_of(expected.train).items():
        np.testing.assert_array_equal(rows_of(found.train)[name], array)
    assert found.sha256 == expected.sha256


def test_a_target_that_is_not_whole_is_a_number_and_text_or_whole_numbers_are_classes(folder):
    assert rows_of(source_in(folder, target="price").load().train)["y"].shape == (4, 1)
    assert source_in(folder, target="rooms").load().classes == ("1", "2", "3")
    found = rows_of(source_in(folder, target="rooms", task="regression").load().train)
    assert found["y"].tolist() == [[1], [2], [3], [2]]


def test_numbers_may_stay_as_they_are_and_columns_may_be_categories_alone(folder):
    found = rows_of(source_in(folder, normalize=False).load().train)
    assert found["x"].tolist() == [[10], [20], [30], [40]]
    found = rows_of(source_in(folder, inputs=["city"]).load().train)
    assert (found["x"].shape, found["categories"].shape) == ((4, 0), (4, 1))


@pytest.mark.parametrize("number", [7, 0, 0.1, 14.62, -100.1])
def test_a_column_of_one_number_is_not_divided_by_zero_or_by_its_rounding(folder, number):
    rows = {name: column * 250 for name, column in TRAIN.items()}  # numpy's std is 4e-15 of 14.62
    (folder / "train.csv").write_text(as_csv(rows | {"area": [number] * 1000}))
    (folder / "test.csv").write_text(as_csv(TEST | {"area": [number, number + 0.5]}))
    data = source_in(folder).load()
    assert not rows_of(data.train)["x"].any()
    # One rounding of float64 in the difference, and one to float32.
    np.testing.assert_allclose(rows_of(data.test)["x"], [[0], [0.5]], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_that_differ_by_their_rounding_alone_keep_their_scale(tmp_path, dtype):
    one = np.array([0.1], dtype)[0]
    area = np.array([one, np.nextafter(one, one + 1), one, one], dtype)
    for part in ("train", "test"):
        pq.write_table(pa.table(TRAIN | {"area": area}), tmp_path / f"{part}.parquet")
    assert abs(rows_of(source_in(tmp_path).load().train)["x"]).max() < 1e-7


def test_one_share_of_the_rows_is_for_testing_and_stays_there_when_rows_are_added(tmp_path):
    is_test = rows_for_testing(10_000, 0.2)
    assert abs(is_test.mean() - 0.2) < 0.02
    np.testing.assert_array_equal(rows_for_testing(500, 0.2), is_test[:500])


@pytest.mark.parametrize("name", ["npz", "parquet", "table"])
def test_each_source_holds_a_share_of_its_training_part_back(tmp_path, name):
    rows = {"x": np.arange(50.0), "label": np.arange(50) % 3}
    np.savez(tmp_path / "train.npz", **rows)
    pq.write_table(pa.table(rows), tmp_path / "train.parquet")
    of_table = {"inputs": ["x"], "target": "label", "normalize": False} if name == "table" else {}

    def parts(test_share):
        kwargs = {"test_share": test_share, **of_table}
        data = make_source(name, directory=str(tmp_path), kwargs=kwargs).load()
        return data.train, data.test

    is_test = rows_for_testing(50, 0.2)
    for part, rows in zip(parts(0.2), (~is_test, is_test), strict=True):
        np.testing.assert_array_equal(rows_of(part)["x"].reshape(-1), np.flatnonzero(rows))
        np.testing.assert_array_equal(column_of(part, "label"), np.flatnonzero(rows) % 3)
    with pytest.raises(ConfigError, match="test_share: 1.5 is not between 0 and 1"):
        parts(1.5)
    with pytest.raises(DataError, match="leaves one part of 50 rows empty"):
        parts(1e-9)


def test_new_rows_are_encoded_like_those_of_the_run(folder):
    data = source_in(folder).load()
    encoding = Encoding(**data.encoding)
    (folder / "new.csv").write_text("city,area\nRome,20\n")  # without a target, in another order
    found = rows_of(rows_in(folder / "new.csv", encoding))
    np.testing.assert_array_equal(found["x"], rows_of(data.train)["x"][1:2])
    assert found["categories"].tolist() == [[1]]


def test_an_unseen_category_may_have_a_number_of_its_own(folder):
    (folder / "test.csv").write_text(as_csv({**TEST, "city": ["Oslo", "Rome"]}))
    source = source_in(folder, unseen="reserve")
    assert rows_of(source.load().test)["categories"].tolist() == [[3], [1]]
    assert source.num_categories == [4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"city": ["Rome", "Oslo"]}, "row 2 .* has 'Oslo' in column 'city': none of the 3 cat"),
        ({"area": [1, "two"]}, "row 2 .* has 'two' in column 'area': no finite"),
        ({"area": ["", 2]}, "row 1 .* has '' in column 'area': no finite"),
        ({"area": [1, "inf"]}, "row 2 .* has 'inf' in column 'area': no finite number"),
        ({"kind": ["dear", "free"]}, "row 2 .* has 'free' in column 'kind': none of the 2"),
    ],
)
def test_a_bad_entry_is_named_by_file_row_and_column(folder, change, message):
    (folder / "test.csv").write_text(as_csv(TEST | change))
    with pytest.raises(DataError, match=f"test.csv: {message}") as error:
        source_in(folder)
    assert "\n" not in str(error.value)


def test_missing_numbers_of_all_files_are_counted_in_one_error(folder):
    (folder / "train.csv").write_text(as_csv(TRAIN | {"area": [1, "NA", "", ""]}))
    (folder / "train2.csv").write_text(as_csv(TRAIN | {"area": ["NaN", 2, 3, 4]}))
    with pytest.raises(DataError, match=r"train.csv: row 2 .*fill_missing\)\. Such rows: 4\."):
        source_in(folder, inputs=["area", "rooms"], categorical=[])


def test_missing_numbers_may_be_the_mean_of_the_training_part(folder, tmp_path):
    (folder / "train.csv").write_text(as_csv(TRAIN | {"area": ["", 10, "NA", 30]}))
    (folder / "test.csv").write_text(as_csv(TEST | {"area": ["", 50]}))
    data = source_in(folder, normalize="fill_missing").load()
    np.testing.assert_allclose(rows_of(data.train)["x"][:, 0], [0, -1, 0, 1])
    np.testing.assert_allclose(rows_of(data.test)["x"][:, 0], [0, 3])
    new = {"area": [None, 10.0], "city": ["Rome", "Rome"]}
    pq.write_table(pa.table(new), tmp_path / "new.parquet")
    found = rows_of(rows_in(tmp_path / "new.parquet", Encoding(**data.encoding)))
    np.testing.assert_allclose(found["x"][:, 0], [0, -1])
    (folder / "train.csv").write_text(as_csv(TRAIN | {"area": [""] * 4}))
    with pytest.raises(DataError, match="Such rows: 4"):
        source_in(folder, normalize="fill_missing")


def test_the_encodings_of_earlier_runs_are_read_and_equal_those_of_today(folder):
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
        (["1.5", "inf", "2.5", "3.5"], "price"),
        (["1", "NA", "0", "1"], "flag"),
    ],
)
def test_a_missing_target_is_refused_and_no_class_of_its_own(folder, kind, target):
    for part in ("train", "test"):
        (folder / f"{part}.csv").write_text(as_csv(TRAIN | {target: kind}))
    with pytest.raises(DataError, match=f"row 2 .* in column '{target}'"):
        source_in(folder, target=target)


def test_the_description_counts_the_training_rows_of_each_class(folder):
    assert "2 classes, of which 'cheap' 1, 'dear' 3" in source_in(folder).load().description


SAME = {"member": [True, False, True, False], "floor": [1.0, 2.0, None, 30.0], "plain": "abca"}


def test_booleans_and_whole_numbers_are_the_same_categories_in_each_format(tmp_path, caplog):
    columns = {name: [*column] for name, column in (TRAIN | SAME).items()}
    for part in ("train", "test"):
        pq.write_table(pa.table(columns), tmp_path / f"{part}.parquet")
    names = [*SAME]
    kwargs = {"inputs": names, "categorical": names, "unseen": "reserve"}
    data = source_in(tmp_path, **kwargs).load()
    want = rows_of(data.train)["categories"]
    spellings = {"member": ["True", "FALSE", "true", "False"], "plain": [*"abca"]}
    for floor in (["1.0", "2", "", "30.00"], ["1", "2.0", "", "30"]):
        (tmp_path / "new.csv").write_text(as_csv(spellings | {"floor": floor}))
        found = rows_in(tmp_path / "new.csv", Encoding(**data.encoding))
        np.testing.assert_array_equal(rows_of(found)["categories"], want)
    assert not caplog.text
    (tmp_path / "new.csv").write_text(
        as_csv({"member": "yn", "floor": ["01", "1.5"], "plain": "ab"})
    )
    found = rows_of(rows_in(tmp_path / "new.csv", Encoding(**data.encoding)))["categories"]
    assert found.tolist() == [[2, 4, 0], [2, 4, 1]]
    assert ["'floor' has no category" in message for message in caplog.messages] == [False, True]


def test_a_run_whose_categories_were_written_otherwise_finds_them(folder):
    old = {"means": {}, "stds": {}, "categories": {"member": ["False", "True"], "n": ["1", "1.0"]}}
    pq.write_table(pa.table({"member": [True, False], "n": ["1.0", "1"]}), folder / "new.parquet")
    found = rows_of(rows_in(folder / "new.parquet", Encoding(**old)))["categories"]
    assert found.tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize(
    "change",
    [
        {"area": pa.array([1, 2], pa.int32())},
        {"area": pa.array([1.0, 2.0], pa.float32())},
        {"rooms": pa.array([1, None], pa.float64())},
        {"city": pa.array(["Rome", "Rome"], pa.large_string())},
        {"city": pa.array(["Rome", "Rome"]).dictionary_encode()},
        {"city": pa.nulls(2)},
        {"kind": pa.array(["dear", "cheap"]).dictionary_encode()},
    ],
)
def test_columns_of_one_table_may_have_other_types_in_each_file(folder, change):
    fields = pa.table(TEST | change)
    required = pa.schema([field.with_nullable(field.name == "rooms") for field in fields.schema])
    pq.write_table(fields.cast(required) if "city" not in change else fields, folder / "t.parquet")
    (folder / "t.parquet").rename(folder / "train1.parquet")
    pq.write_table(pa.table(TRAIN), folder / "train2.parquet")  # beside train.csv
    kwargs = {"inputs": ["area", "city", "rooms"], "normalize": "fill_missing"}
    found = rows_of(source_in(folder, **kwargs).load().train)
    assert found["x"].shape == (10, 2)
    assert found["label"].tolist() == [1, 0, 1, 1, 1, 0, 1, 0, 1, 1]


def test_types_that_have_nothing_in_common_are_refused_with_the_column(folder):
    pq.write_table(pa.table({**TEST, "city": [[1], [2]]}), folder / "train1.parquet")
    with pytest.raises(DataError, match="column 'city' of text"):
        source_in(folder)


def test_a_bad_entry_is_named_in_the_second_of_two_files_too(folder):
    (folder / "train2.csv").write_text(as_csv({**TRAIN, "area": [1, 2, "x", 4]}))
    with pytest.raises(DataError, match="train2.csv: row 3 "):
        source_in(folder)


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


def test_dates_are_no_numbers(tmp_path):
    dates = {**TRAIN, "area": np.array(["2020-01-01"] * 4, "datetime64[s]")}
    for part in ("train", "test"):
        pq.write_table(pa.table(dates), tmp_path / f"{part}.parquet")
    with pytest.raises(DataError, match="'2020-01-01.* in column 'area': no finite number"):
        source_in(tmp_path)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"inputs": []}, "Name at least one column"),
        ({"inputs": ["area", "kind"]}, "not the target"),
        ({"categorical": ["rooms"]}, "'rooms' is no input"),
        ({"task": "ranking"}, "Choose one of None, 'classification', 'regression'"),
        ({"unseen": "drop"}, "Choose one of 'error', 'reserve'"),
        ({"normalize": "fill"}, "Choose one of True, False, 'fill_missing'"),
        ({"test_share": 1.5}, "not between 0 and 1"),
    ],
)
def test_an_argument_that_breaks_its_rule_is_refused(folder, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        source_in(folder, **kwargs)
