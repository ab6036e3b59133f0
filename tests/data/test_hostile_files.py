"""Files that are damaged, of another kind than their name, or no files: one line, no program."""

import io
import os
import random
import shutil
import tarfile

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image

from jddp.data import RowExamples, make_data_set
from jddp.data.sources import make_source
from jddp.ground.errors import DataError, Error

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
PIXELS = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The file that Ghostscript would leave, where a program of that name is on the path."""
    (programs := tmp_path / "programs").mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexit 1\n")
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "started"


@pytest.fixture
def folder(tmp_path):
    """A folder of images of one class."""
    for part in ("train", "test"):
        (tmp_path / "images" / part / "cat").mkdir(parents=True)
        Image.fromarray(PIXELS).save(tmp_path / "images" / part / "cat" / "a.png")
    return tmp_path / "images"


def images_in(folder, **kwargs):
    return make_source("image_folder", directory=str(folder), kwargs={"image_size": 8, **kwargs})


def test_an_image_that_is_a_program_of_another_format_starts_nothing(folder, started):
    (folder / "train" / "cat" / "b.png").write_bytes(EPS)
    train = images_in(folder).load().train
    with pytest.raises(DataError, match=r"b\.png: does not decode"):
        train.take(np.array([1]))
    batch = images_in(folder, undecodable="mask").load().train.take(np.arange(2))
    assert batch["mask"].tolist() == [1, 0]
    assert not started.exists()


def stored_images(tmp_path, *rows):
    """Parquet files and a saved data set with a column of images."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int32")})
    given = {"image": list(rows), "label": [*range(len(rows))]}
    made = datasets.Dataset.from_dict(given, features=features)
    for part in ("train", "test"):
        made.to_parquet(str(tmp_path / f"{part}.parquet"))
        made.save_to_disk(str(tmp_path / part))


def png(pixels):
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


@pytest.mark.parametrize("name", ["parquet", "hugging_face"])
def test_images_in_columns_are_decoded_but_in_no_format_that_starts_a_program(
    tmp_path, started, name
):
    stored_images(tmp_path, {"bytes": png(PIXELS)}, {"bytes": png(PIXELS[::-1])})
    batch = make_source(name, directory=str(tmp_path)).load().train.take(np.arange(2))
    np.testing.assert_array_equal(batch["image"], [PIXELS, PIXELS[::-1]])
    for part in ("train", "test"):
        shutil.rmtree(tmp_path / part)
    stored_images(tmp_path, {"bytes": EPS})
    with pytest.raises(DataError, match="an image of column 'image': does not decode"):
        make_source(name, directory=str(tmp_path))
    assert not started.exists()


def write_column(tmp_path, kind, **stored):
    """Parquet files with a column of numbers and one of another kind, which has this one value."""
    plain = datasets.Features({"bytes": datasets.Value("binary"), "path": datasets.Value("string")})
    features = datasets.Features({"x": datasets.Value("float32"), "other": plain})
    made = datasets.Dataset.from_dict({"x": [1.0], "other": [stored]}, features=features)
    made = made.cast_column("other", kind)
    for part in ("train", "test"):
        pyarrow.parquet.write_table(made.data.table, tmp_path / f"{part}.parquet")


def test_an_image_of_which_only_the_address_is_stored_is_not_fetched(tmp_path):
    write_column(tmp_path, datasets.Image(), bytes=None, path="http://127.0.0.1:9/cat.png")
    with pytest.raises(DataError, match="is only a path, which is not read"):
        make_source("parquet", directory=str(tmp_path))


def test_a_column_that_another_program_would_decode_is_refused_unless_it_is_left_out(tmp_path):
    write_column(tmp_path, datasets.Audio(), bytes=b"RIFF", path=None)
    with pytest.raises(DataError, match="column 'other' is Audio.*data.kwargs.columns"):
        make_source("parquet", directory=str(tmp_path))
    source = make_source("parquet", directory=str(tmp_path), kwargs={"columns": ["x"]})
    assert source.load().train.take(np.arange(1))["x"].tolist() == [1.0]


DECODE = """
import numpy as np
def decode(record):
    return {"x": np.frombuffer(record, np.float32)[:3]}
"""


def write_rows(folder, name):
    made = datasets.Dataset.from_dict({"x": np.ones((50, 3), np.float32), "y": [1] * 50})
    folder.mkdir()
    for part in ("train", "test"):
        if name == "hugging_face":
            made.save_to_disk(str(folder / part))
        elif name == "parquet":
            made.to_parquet(str(folder / f"{part}.parquet"))
        elif name == "webdataset":
            with tarfile.open(folder / f"{part}.tar", "w") as tar:
                for i in range(20):
                    np.save(file := io.BytesIO(), np.ones(3, np.float32))
                    (header := tarfile.TarInfo(f"{i}.npy")).size = file.tell()
                    tar.addfile(header, io.BytesIO(file.getvalue()))
        else:
            writer = ArrayRecordWriter(str(folder / f"{part}.array_record"), "group_size:1")
            for _ in range(20):
                writer.write(np.ones(3, np.float32).tobytes())
            writer.close()


def damaged(data, rng):
    """The bytes of a file, cut or with others in the place of some that are not zero."""
    data = bytearray(data)
    places = [place for place, byte in enumerate(data) if byte]
    if rng.random() < 0.3:
        return data[: rng.choice(places)]
    for _ in range(rng.choice([3, 20])):
        data[rng.choice(places)] = rng.randrange(256)
    return data


def read_damaged(name, folder, kwargs):
    """Reads all; returns the error that names the damage, if there is one to be seen."""
    try:
        data = make_source(name, directory=str(folder), kwargs=kwargs).load()
        data.train.take(np.arange(len(data.train)))
    except Error as error:
        return error
    return None


@pytest.mark.parametrize("name", ["parquet", "hugging_face", "webdataset", "array_record"])
def test_damaged_files_of_formats_that_others_read_are_refused_in_one_line(
    tmp_path, monkeypatch, name, capfd
):
    (tmp_path / "hostile_rows.py").write_text(DECODE)
    monkeypatch.syspath_prepend(tmp_path)
    write_rows(tmp_path / "sound", name)
    kwargs = {
        "array_record": {"decode": "hostile_rows:decode"},
        "webdataset": {"members": {"x": "npy"}},
    }.get(name, {})
    errors = []
    for seed in range(12):
        rng, copy = random.Random(seed), tmp_path / f"copy-{seed}"
        shutil.copytree(tmp_path / "sound", copy)
        file = rng.choice(sorted(x for x in copy.rglob("*") if x.is_file()))
        file.write_bytes(damaged(file.read_bytes(), rng))
        errors.append(read_damaged(name, copy, kwargs))
    refused = [error for error in errors if error is not None]
    assert len(refused) > 3
    assert {error.exit_code for error in refused} == {65}, refused
    assert not [error for error in refused if "\n" in str(error)]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["b.png", "loop.png"])
def test_a_pipe_or_a_link_to_itself_among_images_is_named(folder, name):
    path = folder / "train" / "cat" / name
    if name == "b.png":
        os.mkfifo(path)
    else:
        path.symlink_to(path)
    with pytest.raises(DataError, match=rf"{name}: a link that leads to no file, a named pipe"):
        images_in(folder).load()


def test_names_that_are_not_utf_8_are_read_and_shown(folder):
    name = os.fsdecode(b"caf\xe9")
    for part in ("train", "test"):
        (folder / part / name).mkdir()
        Image.fromarray(PIXELS).save(folder / part / name / f"{name}.png")
    (folder / "train" / name / f"{name}.jpg").write_bytes(b"no image")
    data = images_in(folder).load()
    assert data.classes == (name, "cat")
    assert len(data.train) == 3
    with pytest.raises(DataError, match=r"caf\\xe9\.jpg: does not decode"):
        data.train.take(np.arange(3))


@pytest.mark.parametrize("name", ["npz", "npy", "idx", "tokens", "parquet", "array_record"])
def test_a_pipe_in_the_place_of_a_file_is_named(tmp_path, name):
    pipes = {
        "npz": "train.npz",
        "npy": "train_images.npy",
        "idx": "train-images-idx3-ubyte",
        "tokens": "train.npy",
        "parquet": "train.parquet",
        "array_record": "train.array_record",
    }
    kwargs = {
        "npy": {"image_size": 8, "num_classes": 2},
        "idx": {"image_size": 8, "num_classes": 2},
        "tokens": {"sequence_length": 4},
        "array_record": {"decode": "math:sqrt"},
    }
    os.mkfifo(tmp_path / pipes[name])
    with pytest.raises(DataError, match="not a file, but a folder, a named pipe or a device"):
        make_source(name, directory=str(tmp_path), kwargs=kwargs.get(name, {})).load()


def test_a_masked_array_is_refused_and_a_big_endian_one_is_read():
    masked = np.ma.masked_array(np.ones((4, 2)), mask=np.eye(4, 2) > 0)
    for data in ({"x": masked}, RowExamples([{"x": row} for row in masked])):
        with pytest.raises(DataError, match="array 'x' is a masked array with missing values"):
            make_data_set("mine", data, data)
    whole = np.ma.masked_array(np.arange(8.0).reshape(4, 2))
    for x in (whole, whole.data.astype(">f8"), whole.data.astype(">i4")):
        (taken,) = make_data_set("mine", {"x": x}, {"x": x}).train.take(np.arange(4)).values()
        assert taken.dtype.isnative
        np.testing.assert_array_equal(taken, whole.data)
