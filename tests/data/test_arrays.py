"""Arrays: your own, in files, and Fashion-MNIST; read as they were written, or refused."""

import pickle

import grain
import numpy as np
import pytest
from data_files import rows_of
from states import equal

from jddp.data import ArrayExamples, RowExamples, eval_batches, make_data_set, make_source
from jddp.data.examples import column_of
from jddp.data.source import rows_for_testing, spec_of
from jddp.data.sources.arrays import image_examples, map_npy, read_npz
from jddp.ground.errors import ConfigError, DataError

X = np.arange(24, dtype=np.float32).reshape(8, 3)
Y = np.arange(8) % 4
ROWS = {"x": X, "y": Y.astype(np.int32)}
SPEC = {"x": ((3,), np.dtype("float32")), "y": ((), np.dtype("int32"))}


def test_arrays_of_any_names_come_from_npz_files_also_of_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for part, save in (("train", np.savez), ("test", np.savez_compressed)):
        save(tmp_path / f"{part}.npz", x=X, y=Y)
    source = make_source("npz", directory="~")
    data = source.load()
    equal((rows_of(data.train), rows_of(data.test)), (ROWS, ROWS))
    assert source.spec == SPEC


def test_mapped_arrays_are_checked_where_they_are_read(tmp_path):
    np.save(tmp_path / "x.npy", np.where(np.arange(3000) == 100, np.nan, 0.0))
    examples = ArrayExamples({"x": map_npy(tmp_path / "x.npy")})
    assert len(pickle.dumps(examples)) < 1000  # for a worker, which opens the file again
    with pytest.raises(DataError, match="'x' holds NaN or infinity, first in row 100"):
        examples.take(np.array([0, 100]))


@pytest.mark.parametrize("array", [X, np.asfortranarray(X), X[:0], np.float32(3)], ids=np.shape)
def test_mapped_arrays_are_those_that_were_saved(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", other=Y, a=array)
    for found in (map_npy(tmp_path / "a.npy"), read_npz(tmp_path / "a.npz")["a"]):
        np.testing.assert_array_equal(found, array, strict=True)
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(found)), array)
        if found.ndim:
            np.testing.assert_array_equal(pickle.loads(pickle.dumps(found[3:5])), array[3:5])


def test_a_damaged_file_of_arrays_is_named(tmp_path):
    npy, npz = tmp_path / "a.npy", tmp_path / "a.npz"
    np.save(npy, X)
    np.savez_compressed(npz, a=np.random.default_rng(0).random(1000))
    sound, flipped = npy.read_bytes(), bytearray(npz.read_bytes())
    flipped[2000] ^= 255
    for read, path, damaged in (
        (map_npy, npy, sound[:-7]),
        (map_npy, npy, sound.replace(b"}", b" ")),
        (map_npy, npy, bytes(flipped)),
        (read_npz, npz, flipped),
        (read_npz, npz, b"nothing"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{path.name}: not a whole"):
            read(path)
    npz.unlink()
    with pytest.raises(DataError, match="npz: no such file"):
        read_npz(npz)


def test_no_format_loads_pickles(tmp_path):
    class Trap:
        def __reduce__(self):
            return exec, ("raise SystemExit('a pickle was loaded')",)

    array = np.array([Trap()], object)
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", a=array)
    for read, name in ((map_npy, "a.npy"), (read_npz, "a.npz")):
        with pytest.raises(DataError, match=name):
            read(tmp_path / name)


BAD_DATA = (
    ({}, "no arrays"),
    ({"x": np.zeros(3), "y": np.zeros(2)}, "different lengths: x 3, y 2"),
    ({"x": np.zeros((0, 2))}, "0 examples"),
    ({"x": np.array([[0.0, 1.0], [np.nan, 0.0]])}, "NaN or infinity, first in row 1"),
    ({"x": np.array(["a"])}, "rows of numbers"),
    ({"x": np.array([2**31])}, "2147483648, which needs 64 bits"),
    ({"x": np.array([0, 1e300])}, r"1e\+300, which needs 64 bits, first in row 1"),
    ({"x": np.ma.masked_array(np.ones(4), mask=np.arange(4) > 2)}, "'x' is a masked array"),
    ([{"x": x} for x in np.ma.masked_array(np.ones((2, 2)), mask=np.eye(2))], "masked array"),
    ({1, 2}, "type set cannot be read"),
    (np.zeros((2, 3)), "a row of the data is ndarray"),
    ([(1, 2)], "is tuple, with names None"),
    ([{"x": X[:1]}, {"x": X[:2]}], r"'x' of the data is .* of shapes \[\(1, 3\), \(2, 3\)\]"),
    ([{"x": 0.0}, {"x": np.nan}], "NaN or infinity, first in row 1"),
    ([{"x": 0}, {"x": 2**33 + 5}], "8589934597, which needs 64 bits, first in row 1"),
    ([{"x": 0}, {"y": 0}], "'x' of the data is int64, object"),
)


@pytest.mark.parametrize(("data", "message"), BAD_DATA)
def test_data_that_no_device_could_hold_are_refused(data, message):
    with pytest.raises(DataError, match=message):
        make_data_set("mine", data, {"x": np.zeros(1)})


def test_own_arrays_become_a_data_set_in_32_bits():
    data = make_data_set("mine", {"x": X, "y": Y}, {"x": X[:2], "y": Y[:2]})
    assert spec_of(data.train) == SPEC
    assert data.description == "mine: 8 train / 2 test examples"
    assert make_data_set("mine", data.train, data.test).sha256 == data.sha256
    assert make_data_set("mine", data.test, data.train).sha256 != data.sha256
    for dtype, narrow in ((">f4", "f4"), (">i8", "i4"), ("u8", "u4")):
        (row,) = ArrayExamples({"x": np.array([1, 2], dtype)}).take(np.array([1])).values()
        assert (row.tolist(), row.dtype) == ([2], np.dtype(narrow))


def test_rows_are_dicts_of_a_list_or_of_grain_or_tuples_with_names():
    named = [{"x": X[i], "y": int(Y[i])} for i in range(8)]
    for rows in (
        RowExamples(list(zip(X, Y, strict=True)), names=("x", "y")),
        RowExamples(named),
        RowExamples(grain.MapDataset.source(named)),
    ):
        equal(rows_of(rows), ROWS)
    share = [*eval_batches(named, global_batch_size=6, process_index=1, num_processes=2)]
    assert [rows["x"].shape for rows in share] == [(3, 3), (0, 3)]  # of a last batch of two


def test_a_share_of_the_rows_is_for_testing_and_stays_there_when_rows_are_added(tmp_path):
    is_test = rows_for_testing(10_000, 0.2)
    assert abs(is_test.mean() - 0.2) < 0.02
    np.testing.assert_array_equal(rows_for_testing(50, 0.2), is_test[:50])
    np.savez(tmp_path / "train.npz", x=np.arange(50.0), label=np.arange(50) % 3)

    def parts(test_share):
        data = make_source("npz", directory=str(tmp_path), kwargs={"test_share": test_share}).load()
        return data.train, data.test

    for part, rows in zip(parts(0.2), (~is_test[:50], is_test[:50]), strict=True):
        np.testing.assert_array_equal(rows_of(part)["x"], np.flatnonzero(rows))
        np.testing.assert_array_equal(column_of(part, "label"), np.flatnonzero(rows) % 3)
    for share, error in ((1.5, ConfigError), (1e-9, DataError)):
        with pytest.raises(error, match="test_share"):
            parts(share)


def npy_source(folder, *, num_train=6, labels=None, dtype=np.uint8, **kwargs):
    for part, n in (("train", num_train), ("test", 4)):
        np.save(folder / f"{part}_images.npy", np.full((n, 8, 8, 3), 255, dtype))
        np.save(folder / f"{part}_labels.npy", np.arange(n) if labels is None else labels[:n])
    kwargs = {"image_size": 8, "num_classes": 10} | kwargs
    return make_source("npy", directory=str(folder), kwargs=kwargs)


def test_npy_directory_is_normalised_per_channel(tmp_path):
    source = npy_source(tmp_path, mean=[0.0, 0.5, 1.0], std=[1.0, 0.5, 0.25])
    data = source.load()
    assert spec_of(data.train) == source.spec
    np.testing.assert_allclose(rows_of(data.train)["image"][2, 0, 0], [1, 1, 0], 1e-6)
    assert data.sha256 != npy_source(tmp_path).load().sha256
    part = npy_source(tmp_path, test_share=0.4).load().test
    np.testing.assert_array_equal(rows_of(part)["label"], np.arange(6)[rows_for_testing(6, 0.4)])
    images = np.full((4, 2, 2, 1), np.nan, np.float32)
    with pytest.raises(DataError, match="'image' holds NaN"):  # when it is read
        image_examples(images, np.zeros(4, int)).take(np.array([1, 3]))


def test_bad_images_in_an_npy_directory_are_refused(tmp_path):
    for damage, message in (
        ({"image_size": 9}, r"images of shape \(8, 8, 3\), .* ask for \(9, 9, 3\)"),
        ({"labels": np.zeros(6)}, "labels float64"),
        ({"dtype": np.int64}, "images are int64"),
        ({"num_train": 0}, "0 examples"),
        ({"mean": [0.5, 0.5]}, "mean has 2 numbers, but images have 3 channels"),
    ):
        with pytest.raises(DataError, match=message):
            npy_source(tmp_path, **damage).load()


def test_sources_know_their_shapes_without_reading():
    for source in map(make_source, ("fashion_mnist", "python_stdlib")):
        data = source.load()
        assert spec_of(data.train) == spec_of(data.test) == source.spec
        assert data.sha256 == source.load().sha256


def test_wrong_arguments_are_refused_before_anything_is_read():
    for name, arguments, message in (
        ("fashion_mnits", {}, "Did you mean 'fashion_mnist'"),
        ("fashion_mnist", {"kwargs": {"shift": 5}}, "Did you mean 'max_shift'"),
        ("fashion_mnist", {"directory": "here"}, "Leave out data.dir=here"),
        ("fashion_mnist", {"kwargs": {"directory": "here"}}, "data.dir"),
        ("python_stdlib", {"kwargs": {"sequence_length": 0}}, "sequence_length 0"),
        ("python_stdlib", {"kwargs": {"documents": "wrap"}}, "'wrap'"),
        ("tokens", {"kwargs": {"sequence_length": 4}}, "Give data.dir"),
        ("tokens", {"directory": "here"}, "kwargs.sequence_length is missing"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_source(name, **arguments)
