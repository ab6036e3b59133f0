"""Samples in tar files: the same rows as of a folder, in any order, and refused where damaged."""

import io
import json
import pickle
import tarfile

import numpy as np
import pytest
from PIL import Image

from jddp.data import make_source
from jddp.ground.errors import ConfigError, DataError

PHOTO = np.arange(24 * 20 * 3, dtype=np.uint8).reshape(24, 20, 3)


def encoded(pixels, kind):
    Image.fromarray(pixels).save(file := io.BytesIO(), kind)
    return file.getvalue()


def npy(array):
    np.save(file := io.BytesIO(), array, allow_pickle=True)
    return file.getvalue()


JPEG = encoded(PHOTO, "JPEG")


def write_tar(path, members):
    """A tar file of these contents by name."""
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))


def photos(numbers, num_classes=2):
    """Images and classes, as samples of WebDataset."""
    members = {}
    for number in numbers:
        label = number % num_classes
        name = f"class{label}/{number:03}"
        members[f"{name}.jpg"] = encoded(np.roll(PHOTO, number, axis=0), "JPEG")
        members[f"{name}.cls"] = str(label).encode()
    return members


@pytest.fixture
def shards(tmp_path):
    """Three shards of ten images."""
    (tmp_path / "tars").mkdir()
    for name, numbers in (("train-0", range(10)), ("train-1", range(10, 20)), ("test", range(10))):
        write_tar(tmp_path / "tars" / f"{name}.tar", photos(numbers))
    return tmp_path / "tars"


def source_of(folder, **kwargs):
    return make_source("webdataset", directory=str(folder), kwargs={"image_size": 8} | kwargs)


def rows_of(examples):
    return examples.take(np.arange(len(examples)))


def check_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def test_a_tar_file_has_the_rows_of_the_same_files_in_folders(tmp_path):
    members = dict(sorted(photos(range(12)).items()))
    for part in ("train", "test"):
        write_tar(tmp_path / f"{part}.tar", members)
        for name, content in members.items():
            if name.endswith(".jpg"):
                (path := tmp_path / part / name).parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    folder = make_source("image_folder", directory=str(tmp_path), kwargs={"image_size": 8})
    tars = source_of(tmp_path)
    assert (tars.spec, tars.sizes, tars.augment) == (folder.spec, folder.sizes, folder.augment)
    for part in ("train", "test"):
        one, other = getattr(tars.load(), part), getattr(folder.load(), part)
        check_equal(rows_of(one), rows_of(other))
        np.testing.assert_array_equal(one.column("label"), other.column("label"))


def test_samples_are_read_in_any_order_and_named(shards):
    train = source_of(shards).load().train
    assert train.files[12] == "train-1.tar: class0/012"
    whole = rows_of(train)
    order = np.array([19, 3, 3, 12])
    sent = pickle.loads(pickle.dumps(train))  # to a worker
    check_equal(sent.take(order), {name: x[order] for name, x in whole.items()})
    assert train.take(np.zeros(0, int))["image"].shape == (0, 8, 8, 3)


def test_arrays_and_numbers_are_read_by_the_endings_of_their_members(tmp_path):
    x = np.arange(12, dtype=np.float64).reshape(4, 3)
    members = {}
    for row in range(4):
        about = {"age": row, "box": [0, row], "name": "cat"}
        members |= {
            f"{row}.left.npy": npy(x[row]),
            f"{row}.json": json.dumps(about).encode(),
            f"{row}.txt": b"a cat",
        }
    for part in ("train", "test"):
        write_tar(tmp_path / f"{part}.tar", members)
    named = {"x": "left.npy", "y": "json:box", "label": "json:age"}
    source = source_of(tmp_path, image_size=None, members=named)
    rows = rows_of(source.load().train)
    assert source.sizes == {"num_classes": 4}
    assert source.augment == ()
    np.testing.assert_array_equal(rows["x"], x)
    assert rows["x"].dtype == np.float32
    assert rows["y"].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert rows["label"].tolist() == [0, 1, 2, 3]
    with pytest.raises(
        DataError, match=r"members left.npy, json.age, .* 'x' is to be .* json:size"
    ):
        source_of(tmp_path, image_size=None, members={"x": "json:size"})
    with pytest.raises(DataError, match="'x' of the data is <U3"):
        source_of(tmp_path, image_size=None, members={"x": "json:name"})


def test_names_of_members_follow_the_format(tmp_path):
    long = "a" * 200  # in headers of their own
    members = {f"{long}/b.c/1.JPG": encoded(PHOTO, "JPEG"), f"{long}/b.c/1.cls": b" 1\n"}
    for part in ("train", "test"):
        write_tar(tmp_path / f"{part}.tar", {".hidden.jpg": b"", "no_ending": b"", **members})
    data = source_of(tmp_path).load()
    assert data.train.files == [f"train.tar: {long}/b.c/1"]
    assert rows_of(data.train)["label"].tolist() == [1]


def test_a_share_of_the_samples_is_held_back_for_testing(shards):
    shared = source_of(shards, test_share=0.25).load()
    names = {*shared.train.files}, {*shared.test.files}
    assert len(names[0] | names[1]) == 30
    assert not names[0] & names[1]
    assert 2 <= len(names[1]) <= 15
    with pytest.raises(ConfigError, match="test_share: 2 is not between 0 and 1"):
        source_of(shards, test_share=2)


def test_an_image_that_does_not_decode_is_named_or_masked_out(shards, caplog):
    write_tar(shards / "train-1.tar", {"cat/1.jpg": b"no image", "cat/1.cls": b"0"})
    with pytest.raises(DataError, match=r"train-1\.tar: cat/1: does not decode .*undecodable=mask"):
        rows_of(source_of(shards).load().train)
    source = source_of(shards, undecodable="mask")
    rows = rows_of(source.load().train)
    assert rows["mask"].tolist() == [1] * 10 + [0]
    assert source.spec["mask"] == ((), np.dtype("float32"))
    assert "cat/1: does not decode" in caplog.text


@pytest.mark.parametrize(
    ("error", "message", "kwargs"),
    [
        (ConfigError, "Give endings by names", {"members": "jpg"}),
        (ConfigError, "A size is needed with 'image'", {"image_size": None}),
        (ConfigError, "undecodable: 'skip'. Choose", {"undecodable": "skip"}),
        (DataError, "mean has 2 numbers", {"mean": [0.5, 0.5]}),
        (DataError, "cls is no image", {"members": {"image": "cls"}}),
        (DataError, r"train\*\.tar: .*'image' is to be one of png", {"members": {"image": "png"}}),
    ],
)
def test_wrong_arguments_are_refused(shards, error, message, kwargs):
    with pytest.raises(error, match=message):
        source_of(shards, **kwargs)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"1.jpg": JPEG, "1.png": JPEG, "1.cls": b"1"}, "'image' is to be one of bmp;gif"),
        ({"1.jpg": JPEG, "1.cls": b"cat"}, r"train\*\.tar: invalid literal"),
        ({"1.jpg": JPEG, "1.cls": b"-1"}, r"labels .* \[-1\]\. They need whole"),
        ({"1.jpg": JPEG, "1.cls": str(2**40).encode()}, "which needs 64 bits"),
        ({"22.05.jpg": JPEG, "22.05.cls": b"1"}, r"05\.jpg, 05\.cls.*ends at its first dot"),
        ({"1.txt": b""}, "members txt, and 'image' is to be"),
        (
            {f"{i}.{x}": JPEG if x == "jpg" else b"1" for i in range(7) for x in ("jpg", "cls")}
            | {"7.jpg": JPEG},
            r"train\.tar: 7 has no member cls\. Add it",
        ),
        ({"1.npy": npy(np.array([{}]))}, "allow_pickle"),
    ],
)
def test_bad_samples_are_refused(tmp_path, members, message):
    for part in ("train", "test"):
        write_tar(tmp_path / f"{part}.tar", members)
    with pytest.raises(DataError, match=message):
        source_of(tmp_path)
