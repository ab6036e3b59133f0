"""Formats: each read back as it was written, and refused where it is damaged."""

import gzip
import pickle
import sys
import zipfile

import datasets
import grain
import make_fashion_mnist as script
import numpy as np
import pytest
from PIL import Image

from jddp.data import (
    RowExamples,
    eval_batches,
    make_data_set,
    make_source,
)
from jddp.data.examples import column_of
from jddp.data.source import rows_for_testing, spec_of
from jddp.data.sources.arrays import MappedArray, map_npy, map_npz
from jddp.data.sources.images import FolderExamples
from jddp.data.sources.tokens import TokenExamples
from jddp.data.transforms import CropAndFlip
from jddp.ground.errors import ConfigError, DataError, FileSystemError

X = np.arange(24, dtype=np.float32).reshape(8, 3)
Y = np.arange(8) % 4


def take_all(examples):
    return examples.take(np.arange(len(examples)))


def check_rows(examples):
    """They are X and Y, in 32 bits."""
    rows = examples.take(np.array([5, 0]))
    np.testing.assert_array_equal(rows["x"], X[[5, 0]])
    np.testing.assert_array_equal(rows["y"], Y[[5, 0]])
    assert (rows["x"].dtype, rows["y"].dtype) == (np.float32, np.int32)
    assert len(examples) == 8


def test_arrays_of_any_names_come_from_npz_files_also_of_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for save in (np.savez, np.savez_compressed):
        for part in ("train", "test"):
            save(tmp_path / f"{part}.npz", x=X, y=Y)
        source = make_source("npz", directory="~")
        check_rows(source.load().train)
        assert source.spec == {"x": ((3,), np.dtype("float32")), "y": ((), np.dtype("int32"))}


def test_mapped_arrays_are_checked_where_they_are_read(tmp_path):
    for part in ("train", "test"):
        np.savez(tmp_path / f"{part}.npz", x=np.where(np.arange(3000) == 100, np.nan, 0.0))
    examples = make_source("npz", directory=str(tmp_path)).load().train
    assert len(pickle.dumps(examples)) < 1000  # for a worker, which opens the file again
    with pytest.raises(DataError, match="'x' holds NaN or infinity, first in row 100"):
        examples.take(np.array([0, 100]))


@pytest.mark.parametrize("array", [X, np.asfortranarray(X), X[:0], np.float32(3)], ids=np.shape)
def test_mapped_arrays_are_those_that_were_saved(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", other=Y, a=array)
    for found in (map_npy(tmp_path / "a.npy"), map_npz(tmp_path / "a.npz")["a"]):
        np.testing.assert_array_equal(found, array)
        assert found.dtype == array.dtype


def test_a_mapped_array_is_sent_as_its_place_and_a_part_of_one_as_it_is(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((1000, 100)))
    np.savez(tmp_path / "a.npz", a=np.ones((1000, 100)))
    for array in (map_npy(tmp_path / "a.npy"), map_npz(tmp_path / "a.npz")["a"]):
        assert isinstance(array, MappedArray)
        sent = pickle.dumps(array)
        assert len(sent) < 1000
        np.testing.assert_array_equal(pickle.loads(sent), array)
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(array[3:5])), array[3:5])
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_damaged_file_of_arrays_is_named_with_the_place_or_the_member(tmp_path):
    npy, npz, text = (tmp_path / name for name in ("a.npy", "a.npz", "text.npz"))
    np.save(npy, X)
    np.savez_compressed(npz, a=np.random.default_rng(0).random(1000))
    with zipfile.ZipFile(text, "w") as archive:
        archive.writestr("readme.txt", "hello")
    sound, flipped = npy.read_bytes(), bytearray(npz.read_bytes())
    flipped[2000] ^= 255
    encrypted = bytearray(npz.read_bytes())
    encrypted[encrypted.index(b"PK\1\2") + 8] |= 1  # a bit of the flags in the directory
    encrypted[6] |= 1
    for read, path, damaged, message in (
        (map_npy, npy, sound[:-7], "cut off at byte 217 of 224"),
        (map_npy, npy, b"x" + sound[1:], r"not a whole \.npy file"),
        (map_npy, npy, sound[:9], r"not a whole \.npy file"),
        (map_npy, npy, sound.replace(b"}", b" "), r"not a whole \.npy file"),
        (map_npz, npz, encrypted, r"a\.npy: not a whole array .*encrypted"),
        (map_npz, npz, flipped, r"a\.npy: not a whole array"),
        (map_npz, npz, b"nothing", r"not a whole \.npz file"),
        (map_npz, npz, text.read_bytes(), r"readme\.txt: not a whole \.npy file"),
        (map_npz, npz, None, "no such file"),
    ):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{path.name}: {message}"):
            read(path)


def test_no_format_loads_pickles(tmp_path):
    class Trap:
        def __reduce__(self):
            return exec, ("raise SystemExit('a pickle was loaded')",)

    array = np.array([Trap()], object)
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", a=array)
    np.savez_compressed(tmp_path / "b.npz", a=array)
    for read, name in ((map_npy, "a.npy"), (map_npz, "a.npz"), (map_npz, "b.npz")):
        with pytest.raises(DataError, match="Python objects|not a whole array"):
            read(tmp_path / name)


@pytest.mark.parametrize("is_packed", [False, True])
def test_idx_files_are_read_as_mnist_is_published(tmp_path, is_packed):
    images, labels = np.arange(96, dtype=np.uint8).reshape(6, 4, 4), np.arange(6, dtype="u1") % 3
    for part in ("train", "t10k"):
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            data = script.pack(array) if is_packed else gzip.decompress(script.pack(array))
            (tmp_path / f"{part}-{name}-ubyte{'.gz' * is_packed}").write_bytes(data)

    def of_folder(**kwargs):
        kwargs = {"image_size": 4, "num_classes": 3, "mean": 0.0, "std": 1.0} | kwargs
        return make_source("idx", directory=str(tmp_path), kwargs=kwargs)

    part = of_folder(test_share=0.4).load().test
    np.testing.assert_array_equal(column_of(part, "label"), labels[rows_for_testing(6, 0.4)])
    with pytest.raises(ConfigError, match="test_share: 1.5 is not between 0 and 1"):
        of_folder(test_share=1.5)
    data = of_folder().load()
    assert spec_of(data.train) == of_folder().spec
    rows = take_all(data.test)
    np.testing.assert_allclose(rows["image"][..., 0] * 255, images, rtol=1e-6)
    np.testing.assert_array_equal(rows["label"], labels)
    for bad, message in (({"num_classes": 2}, "range from 0 to 2"), ({"image_size": 5}, "Change")):
        with pytest.raises(DataError, match=message):
            of_folder(**bad).load()
    if not is_packed:
        path = tmp_path / "train-images-idx3-ubyte"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(DataError, match=r"train-images-idx3-ubyte: not a whole IDX file: 95"):
            of_folder().load()


def test_an_image_that_does_not_decode_or_is_too_large_is_named_or_does_not_count(
    folder, caplog, monkeypatch
):
    (folder / "train" / "dark" / "a.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"dark/a\.png: does not decode"):
        take_all(images_in(folder).load().train)
    source = images_in(folder, undecodable="mask")
    train = source.load().train
    assert take_all(train)["mask"].tolist() == [0, 1, 1, 1, 1, 1]
    assert spec_of(train) == source.spec
    assert len(caplog.records) == 1  # once, not in each epoch
    assert "dark/a.png: does not decode" in caplog.text
    assert "(such images so far: 1)" in caplog.text
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)  # Pillow's limit is kept.
    with pytest.raises(DataError, match=r"a\.png: does not decode .*exceeds limit of 500 pixels"):
        FolderExamples(folder / "test", image_size=8).decode(0)


def save_image(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(path, **options)


@pytest.fixture
def folder(tmp_path):
    """Two classes: grey of 40 and of 200, of several formats and sizes."""
    for part in ("train", "test"):
        for name, grey in (("dark", 40), ("light", 200)):
            here = tmp_path / part / name
            save_image(here / "a.png", np.full((20, 30, 3), grey))
            save_image(here / "b.jpg", np.full((64, 48, 3), grey), quality=95)
            save_image(here / "deep" / "c.bmp", np.full((10, 10), grey))
    return tmp_path


def images_in(folder, **kwargs):
    return make_source("image_folder", directory=str(folder), kwargs={"image_size": 8} | kwargs)


def test_images_in_folders_have_the_class_of_their_folder(folder):
    with pytest.raises(DataError, match="mean has 2 numbers, but images have 3 channels"):
        images_in(folder, mean=[0.5, 0.5]).load()
    source = images_in(folder, mean=0.0, std=1.0)
    data = source.load()
    assert spec_of(data.train) == source.spec
    for examples in (data.train, data.test):
        rows = take_all(examples)
        assert rows["label"].tolist() == [0, 0, 0, 1, 1, 1]
        greys = np.where(rows["label"] == 0, 40, 200) / 255
        np.testing.assert_allclose(rows["image"].mean((1, 2, 3)), greys, atol=2 / 255)  # JPEG's
    assert data.description.endswith("6 train / 6 test examples")
    assert source.load().sha256 == data.sha256  # of names and sizes
    (folder / "test" / "dark" / "a.png").write_bytes(b"another size")
    assert source.load().sha256 != data.sha256


def test_the_middle_of_an_image_is_kept_and_its_shorter_side_scaled(tmp_path):
    pixels = np.zeros((4, 8, 3))
    pixels[:, 2:4], pixels[:, 4:6] = 100, 200
    save_image(tmp_path / "x" / "a.png", pixels)
    examples = FolderExamples(tmp_path, image_size=4)
    assert examples.decode(0)[0, :, 0].tolist() == [100, 100, 200, 200]
    half = FolderExamples(tmp_path, image_size=2, margin=0.5)
    assert half.decode(0)[0, :, 0].tolist() == [100, 200]
    # A large JPEG decodes as a small one.
    y, x = np.mgrid[:512, :640] / 4
    save_image(tmp_path / "large" / "x" / "a.jpg", np.stack([y, x, y], -1), quality=95)
    small = FolderExamples(tmp_path / "large", image_size=32, margin=0.125).decode(0).astype(float)
    wide = 512 * 0.875
    middle = np.broadcast_to((np.arange(32) + 0.5) * wide / 32, (32, 32))
    np.testing.assert_allclose(small[:, :, 0], ((512 - wide) / 2 + middle.T) / 4, atol=2)
    np.testing.assert_allclose(small[:, :, 1], ((640 - wide) / 2 + middle) / 4, atol=2)


def test_bad_image_folders_are_refused(folder):
    def refused(error, message, **options):
        with pytest.raises(error, match=message):
            images_in(folder, **options).load()

    refused(DataError, "has 2 classes, but num_classes is 3", num_classes=3)
    refused(ConfigError, "undecodable: 'skip'. Choose 'error' or 'mask'", undecodable="skip")
    refused(ConfigError, "test_share: 1.0 is not between 0 and 1", test_share=1.0)
    refused(DataError, "has folders train and test. Leave test_share out", test_share=0.2)
    (folder / "train" / "other").mkdir()
    refused(DataError, "train/other: no images of this class. Add some, or remove the folder")
    save_image(folder / "train" / "other" / "a.png", np.zeros((8, 8, 3)))
    refused(DataError, "class 'other' is in train, but not in test")
    (folder / "test").rename(folder / "tset")
    refused(DataError, r"test: no such folder. .*train/CLASS/.*or from CLASS/.*test_share=0.2")
    with pytest.raises(DataError, match="no images in folders of classes"):
        FolderExamples(folder / "train" / "other", image_size=8)
    (folder / "train" / "other" / "a.png").write_text("no picture")
    with pytest.raises(DataError, match="does not decode .* data.kwargs.undecodable=mask"):
        FolderExamples(folder / "train", image_size=8).take(np.array([6]))


def test_a_folder_of_classes_is_split_by_the_names_of_its_files(tmp_path):
    for name in ("dark", "light"):
        for number in range(40):
            save_image(tmp_path / name / f"{number}.png", np.zeros((8, 8, 3)))
    (tmp_path / ".cache").mkdir()
    source = images_in(tmp_path, test_share=0.25)
    data = source.load()
    assert source.sizes == {"num_classes": 2}
    assert data.classes == ("dark", "light")
    train, test = {*data.train.files}, {*data.test.files}
    assert len(train | test) == 80
    assert not train & test
    assert 8 <= len(test) <= 32  # 20 on average
    save_image(tmp_path / "dark" / "more.png", np.zeros((8, 8, 3)))
    again = images_in(tmp_path, test_share=0.25).load()
    assert train <= {*again.train.files}
    assert test <= {*again.test.files}
    with pytest.raises(DataError, match="leaves no image for test"):
        images_in(tmp_path, test_share=1e-9).load()


def test_a_crop_enlarges_a_part_and_mirrors_it():
    ramp = np.arange(8, dtype=np.float32)
    image = np.broadcast_to(ramp[:, None, None] * 10 + ramp[:, None], (8, 8, 1))
    batch = {"image": np.stack([image] * 3), "label": np.arange(3)}
    # All of it; mirrored; a quarter, from the lower left.
    uniform = np.array([[1, 0.5, 0, 0, 0.9], [1, 0.5, 0, 0, 0.1], [0, 0.5, 1, 0, 0.9]])
    whole, mirrored, part = CropAndFlip(smallest=0.25)(batch, uniform)["image"]
    np.testing.assert_allclose(whole, image, atol=1e-5)
    np.testing.assert_allclose(mirrored, image[:, ::-1], atol=1e-5)
    places = (np.arange(8) + 0.5) / 2 - 0.5
    want = np.clip(places + 4, 0, 7)[:, None] * 10 + np.clip(places, 0, 7)
    np.testing.assert_allclose(part[:, :, 0], want, atol=1e-4)


def test_windows_of_shards_are_of_each_and_first_tokens_of_documents_are_not_predicted():
    shards = np.arange(11, dtype=np.uint16), np.arange(100, 103), np.arange(200, 209)
    rows = take_all(TokenExamples(*shards, sequence_length=4))
    assert rows["tokens"].tolist() == [[*range(i, i + 5)] for i in (0, 4, 200, 204)]
    documents = [np.array([0, 3, 4]), np.array([0])]
    examples = TokenExamples(np.arange(9), np.arange(9), sequence_length=4, documents=documents)
    assert take_all(examples)["mask"].tolist() == [[1, 1, 0, 0], [1] * 4, [1] * 4, [1] * 4]


def test_rows_are_dicts_of_a_list_or_of_grain_or_tuples_with_names():
    rows = list(zip(X, Y, strict=True))
    check_rows(RowExamples(rows, names=("x", "y")))
    named = [{"x": X[i], "y": int(Y[i])} for i in range(8)]
    check_rows(RowExamples(named))
    check_rows(RowExamples(grain.MapDataset.source(named)))
    share = [*eval_batches(named, global_batch_size=6, process_index=1, num_processes=2)]
    assert [rows["x"].shape for rows in share] == [(3, 3), (0, 3)]  # of a last batch of two
    for bad, message in (
        (rows, r"is tuple, with names None. .*names=\('image', 'label'\)"),
        ([{"x": X[:1]}, {"x": X[:2]}], r"'x' of the data is .* of shapes \[\(1, 3\), \(2, 3\)\]"),
        ([{"x": 0.0}, {"x": np.nan}], "NaN or infinity, first in row 1"),
        ([{"x": 0}, {"x": 2**33 + 5}], "8589934597, which needs 64 bits, first in row 1"),
        ([{"x": 0}, {"x": None}], "'x' of the data is int64, object of shapes"),
        ([{"x": 0}, {"y": 0}], "'x' of the data is int64, object of shapes"),
    ):
        with pytest.raises(DataError, match=message):
            RowExamples(bad).take(np.array([0, 1]))


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_hugging_face_data_set_is_taken_from_memory_disk_and_parquet_without_progress_bars(
    tmp_path, capfd, is_shown
):
    made = datasets.Dataset.from_dict({"x": X, "y": Y, "name": [f"row {i}" for i in range(8)]})
    check_rows(RowExamples(made.select_columns(["x", "y"])))
    check_rows(make_data_set("mine", made.select_columns(["x", "y"]), {"x": X}).train)
    with pytest.raises(DataError, match="'name' of the data is <U5.*leave out that part"):
        RowExamples(made).take(np.array([0]))
    for part in ("train", "test"):
        made.save_to_disk(str(tmp_path / part))
        made.to_parquet(str(tmp_path / f"{part}-0.parquet"))
    set_bars = datasets.enable_progress_bars if is_shown else datasets.disable_progress_bars
    set_bars()
    capfd.readouterr()
    try:
        for name in ("hugging_face", "parquet"):
            source = make_source(name, directory=str(tmp_path), kwargs={"columns": ["x", "y"]})
            check_rows(source.load().train)
            assert source.spec == spec_of(source.load().test)
        assert capfd.readouterr() == ("", "")
        assert datasets.are_progress_bars_disabled() is not is_shown  # as the user set it
    finally:
        datasets.enable_progress_bars()
    for name, message in (("parquet", r"no files train\*\.parquet"), ("hugging_face", "no such")):
        with pytest.raises(DataError, match=message):
            make_source(name, directory=str(tmp_path / "train"))


DECODE = """
import numpy as np
def decode(record):
    numbers = np.frombuffer(record, np.float32)
    return {"x": numbers[:3], "y": numbers[3].astype(int)}
"""


def test_array_records_are_decoded_by_a_function_of_ones_own(tmp_path, monkeypatch):
    from array_record.python.array_record_module import ArrayRecordWriter

    (tmp_path / "rows.py").write_text(DECODE)
    monkeypatch.syspath_prepend(tmp_path)
    for part in ("train", "test"):
        writer = ArrayRecordWriter(str(tmp_path / f"{part}.array_record"), "group_size:1")
        for x, y in zip(X, Y, strict=True):
            writer.write(np.append(x, np.float32(y)).tobytes())
        writer.close()
    kwargs = {"decode": "rows:decode"}
    data = make_source("array_record", directory=str(tmp_path), kwargs=kwargs).load()
    check_rows(data.train)
    check_rows(pickle.loads(pickle.dumps(data.train._rows)) and data.train)


def test_a_library_that_is_missing_or_cannot_write_its_cache_is_named_with_the_way_out(
    tmp_path, monkeypatch
):
    datasets.Dataset.from_dict({"x": X}).to_parquet(str(tmp_path / "train-0.parquet"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "/dev/null/cache")
    with pytest.raises(FileSystemError, match="cannot cache these files: .*Set HF_HOME"):
        make_source("parquet", directory=str(tmp_path))
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / f"{part}.parquet").touch()
        (tmp_path / f"{part}.array_record").touch()
    for name, module, kwargs in (
        ("parquet", "datasets", {}),
        ("hugging_face", "datasets", {}),
        ("array_record", "grain", {"decode": "rows:decode"}),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=rf"{module}, which is not installed: .*jddp\[data\]"):
            make_source(name, directory=str(tmp_path), kwargs=kwargs)
