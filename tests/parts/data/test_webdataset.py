"""Samples in tar files: the same rows as of a folder, in any order, and refused where damaged."""

import contextlib
import io
import json
import pickle
import tarfile

import numpy as np
import pytest
from PIL import Image

from jddp.data import TrainBatches, WorkerBatches, make_source
from jddp.data.sources import tar_samples
from jddp.data.sources.tar_samples import find_samples
from jddp.errors import ConfigError, DataError

PHOTO = np.arange(24 * 20 * 3, dtype=np.uint8).reshape(24, 20, 3)


def encoded(pixels, kind):
    Image.fromarray(pixels).save(file := io.BytesIO(), kind)
    return file.getvalue()


def npy(array):
    np.save(file := io.BytesIO(), array)
    return file.getvalue()


def write_tar(path, members, **options):
    """A tar file of these contents by name."""
    with tarfile.open(path, "w", **options) as tar:
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
    check_equal(train.take(order), {name: x[order] for name, x in whole.items()})
    assert train.take(np.zeros(0, int))["image"].shape == (0, 8, 8, 3)


def test_a_worker_opens_the_files_itself_and_reads_no_header(shards, monkeypatch):
    train = source_of(shards).load().train
    whole = rows_of(train)
    sent = pickle.dumps(train)
    assert len(sent) < 4000
    monkeypatch.setattr(tarfile, "open", None)
    check_equal(rows_of(pickle.loads(sent)), whole)


def test_more_shards_than_may_be_open_are_read(shards, monkeypatch):
    monkeypatch.setattr(tar_samples, "MOST_OPEN", 1)
    train = source_of(shards).load().train
    labels = train.take(np.array([0, 10, 1, 11]))["label"]
    assert labels.tolist() == [0, 0, 1, 1]


@pytest.mark.slow
def test_two_workers_deliver_the_same_batches(shards):
    train = source_of(shards).load().train
    plan = {"global_batch_size": 4, "seed": 0, "num_epochs": 1}
    expected = [*TrainBatches(train, **plan)]
    workers = WorkerBatches(TrainBatches(train, **plan), num_workers=2)
    found = [*workers]
    workers.close()
    for one, other in zip(found, expected, strict=True):
        check_equal(one, other)


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
    with pytest.raises(DataError, match=r"train\.tar: 0\.json: not a whole \.json file .*'size'"):
        source_of(tmp_path, image_size=None, members={"x": "json:size"})
    with pytest.raises(DataError, match="'x' of the data is <U3"):
        source_of(tmp_path, image_size=None, members={"x": "json:name"})


def test_names_of_members_follow_the_format(tmp_path):
    long = "a" * 200  # in headers of their own
    contents = {
        f"{long}/b.c/1.JPG": encoded(PHOTO, "JPEG"),
        f"{long}/b.c/1.cls": b" 1\n",
        ".hidden.jpg": b"",
        "no_ending": b"",
        "README.md": b"",
    }
    for kind in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        write_tar(tmp_path / "a.tar", contents, format=kind)
        samples = find_samples([tmp_path / "a.tar"], [["jpg"], ["cls"]])
        assert samples.names == [f"{long}/b.c/1"]
        assert samples.read(0, 1) == b" 1\n"


def test_samples_without_any_of_the_members_are_left_out_and_counted(tmp_path, caplog):
    write_tar(tmp_path / "a.tar", {"1.cls": b"1", "README.md": b"", "about.txt": b""})
    assert len(find_samples([tmp_path / "a.tar"], [["cls"]])) == 1
    message = "a.tar: 2 samples, such as README, have none of the members that are read"
    assert message in caplog.text


def test_a_name_with_dots_is_refused_with_the_ending_that_it_has(tmp_path):
    write_tar(tmp_path / "a.tar", {"22.05.png": b"", "22.05.cls": b"1"})
    rule = r"A name ends at its first dot\."
    with pytest.raises(DataError, match=rf"a.tar: .* jpg or png, but 05.cls, 05.png\. {rule}"):
        find_samples([tmp_path / "a.tar"], [["png", "jpg"]])
    write_tar(tmp_path / "a.tar", {"22.05.png": b"", "22.cls": b"1"})
    with pytest.raises(DataError, match=rf"sample 22 has no member jpg or png\. {rule}"):
        find_samples([tmp_path / "a.tar"], [["png", "jpg"], ["cls"]])


def test_names_that_are_not_utf_8_or_would_move_the_cursor_are_shown_as_escapes(tmp_path):
    name = "caf\udce9\x1b[2J"  # tarfile writes the first as the byte e9
    write_tar(tmp_path / "train.tar", {f"{name}.cls": b"1", f"{name}.jpg": b"no image"})
    samples = find_samples([tmp_path / "train.tar"], [["jpg"], ["cls"]])
    assert samples.called(0) == r"train.tar: caf\udce9\x1b[2J"
    assert len(samples.fingerprint()) == 64


def test_a_share_of_the_samples_is_held_back_for_testing(shards):
    shared = source_of(shards, test_share=0.25).load()
    names = {*shared.train.files}, {*shared.test.files}
    assert len(names[0] | names[1]) == 30
    assert not names[0] & names[1]
    assert 2 <= len(names[1]) <= 15
    with pytest.raises(ConfigError, match="test_share: 2 is not between 0 and 1"):
        source_of(shards, test_share=2)


def test_an_image_that_does_not_decode_is_named_or_masked_out(shards, caplog):
    write_tar(shards / "train-1.tar", {"cat/1.png": b"no image", "cat/1.cls": b"0"})
    with pytest.raises(DataError, match=r"train-1\.tar: cat/1: does not decode .*undecodable=mask"):
        rows_of(source_of(shards).load().train)
    source = source_of(shards, undecodable="mask")
    rows = rows_of(source.load().train)
    assert rows["mask"].tolist() == [1] * 10 + [0]
    assert source.spec["mask"] == ((), np.dtype("float32"))
    assert "cat/1: does not decode" in caplog.text


def test_a_tar_file_that_is_cut_off_or_damaged_is_named_with_the_byte(shards):
    path = shards / "train-0.tar"
    sound = path.read_bytes()
    end = len(sound.rstrip(b"\0")) // 512 * 512 + 512  # of the last member
    for damaged, message in (
        (sound[: end - 100], f"cut off at byte {end - 100:,}"),
        (sound[:end], f"cut off at byte {end:,}"),
        (sound[: end + 511], f"cut off at byte {end + 511:,}"),
        (sound[: end - 1024], f"cut off at byte {end - 1024:,}"),
        (sound[:end] + b"?" * 1024, f"damaged: no header of tar at byte {end:,}"),
        (sound + sound, f"ends at byte {end:,}, but more follows"),
        (sound[:100], "not a whole tar file"),
        (b"", "not a whole tar file"),
        (b"\x1f\x8b" + sound, "not a whole tar file"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"train-0\.tar: {message}"):
            source_of(shards)
    assert end + 512 <= len(sound)


def test_a_damaged_tar_file_is_read_or_refused_but_never_without_end(shards):
    path = shards / "train-0.tar"
    sound, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(sound)
        header = 512 * int(rng.choice(len(sound) // 512))
        for _ in range(3):
            damaged[header + int(rng.integers(160))] = int(rng.choice([0, 45, 49, 76, 120, 255]))
        damaged[header + 148 : header + 156] = b"%06o\0 " % (
            sum(damaged[header : header + 148]) + 256 + sum(damaged[header + 156 : header + 512])
        )
        path.write_bytes(damaged)
        with contextlib.suppress(DataError):
            rows_of(source_of(shards).load().train)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        header = tarfile.TarInfo("1.jpg")
        header.pax_headers = {"size": "-1536"}
        tar.addfile(header)
    with pytest.raises(DataError, match="damaged: a member of -1,536 bytes at 0"):
        source_of(shards)


def test_a_tar_file_that_is_cut_off_later_is_named_when_it_is_read(shards):
    train = source_of(shards).load().train
    with (shards / "train-1.tar").open("r+b") as file:
        file.truncate(800)
    with pytest.raises(DataError, match=r"train-1\.tar: cut off at byte 800"):
        train.take(np.array([10]))


def test_bad_samples_and_arguments_are_refused(shards):
    def refused(error, message, **kwargs):
        with pytest.raises(error, match=message):
            source_of(shards, **kwargs)

    refused(ConfigError, "'flac' is not decoded. Choose cls or json or npy", members={"x": "flac"})
    refused(ConfigError, "only 'image' is decoded as an image", members={"x": "jpg"})
    refused(ConfigError, r"members: x: \"\['npy'\]\" is not decoded", members={"x": ["npy"]})
    refused(ConfigError, "Give endings by names", members="jpg")
    refused(ConfigError, "A size is needed with 'image'", image_size=None)
    refused(ConfigError, "undecodable: 'skip'. Choose", undecodable="skip")
    refused(DataError, "mean has 2 numbers", mean=[0.5, 0.5])
    refused(DataError, "label 1 is not below the number of classes, 1", num_classes=1)
    refused(
        DataError,
        r"train-0\.tar: sample class0/000 has no member json",
        members={"label": "json", "image": "jpg"},
    )
    image = encoded(PHOTO, "PNG")
    for members, message in (
        ({"1.jpg": image, "1.png": image, "1.cls": b"1"}, "1 has two members bmp or gif"),
        ({"1.jpg": image, "1.jpg ": b"", "1.cls": b"cat"}, r"1\.cls: not a whole \.cls file .*cat"),
        ({"1.jpg": image, "1.cls": b"-1"}, r"train-0\.tar: 1: the label is -1\. It needs a whole"),
        ({"1.jpg": image, "1.cls": str(2**40).encode()}, "which needs 64 bits"),
    ):
        write_tar(shards / "train-0.tar", members)
        refused(DataError, message)
    for part in ("train-0", "train-1"):
        write_tar(shards / f"{part}.tar", {"1.txt": b""})
    refused(DataError, r"train-0\.tar: no sample with a member bmp or cls or gif")
    (shards / "train-0.tar.gz").touch()
    refused(DataError, r"train-0\.tar\.gz: a packed tar file can only be read from its start")


def test_no_member_loads_a_pickle(tmp_path):
    np.save(file := io.BytesIO(), np.array([{}]), allow_pickle=True)
    for part in ("train", "test"):
        write_tar(tmp_path / f"{part}.tar", {"1.npy": file.getvalue()})
    with pytest.raises(DataError, match=r"1\.npy: not a whole \.npy file .*allow_pickle"):
        source_of(tmp_path, image_size=None, members={"x": "npy"})
