"""Rows that `datasets` reads: saved, by name, tar files, streams. There is no network."""

import itertools
import json
import os
import pickle
import random
import shutil
import sys

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from data_files import file_of, rows_of, write_images, write_tar
from runs import refused
from states import equal

from jddp.config.schema import Config
from jddp.data import RowExamples, make_source
from jddp.data.batches import Share
from jddp.data.source import spec_of
from jddp.ground.errors import ConfigError, DataError, Error
from jddp.trainer.job.build import train
from jddp.trainer.runs.predictions import predict_file

X = np.arange(30, dtype=np.float32).reshape(10, 3)
Y = np.arange(10) % 4
WHOLE = Share(0, 1)
BOTH = ("train", "test")
ONE_STEP = {"train": {"num_steps": 1}, "mesh": {"num_devices": 2}}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def splits():
    parts = {"train": X, "test": X[:4], "validation": X[4:6]}
    return datasets.DatasetDict({k: datasets.Dataset.from_dict({"x": x}) for k, x in parts.items()})


@pytest.fixture
def saved(tmp_path, splits):
    splits.save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


@pytest.fixture
def named(tmp_path, splits):
    for name, rows in splits.items():
        rows.to_parquet(str(tmp_path / "named" / f"{name}.parquet"))
    return str(tmp_path / "named")


def source(directory=None, name="hugging_face", **kwargs):
    return make_source(name, directory=directory and str(directory), kwargs=kwargs)


def write(folder, made):
    for part in BOTH:
        made.save_to_disk(str(folder / part))


def test_saved_data_sets_and_named_ones_are_read_with_splits_of_any_names(saved, named):
    data = source(saved, train_split="test", test_split="validation").load()
    equal((rows_of(data.train)["x"], rows_of(data.test)["x"]), (X[:4], X[4:6]))
    with pytest.raises(DataError, match=r"saved/valid"):
        source(saved, test_split="valid")
    data = source(path=named, train_split="train[:80%]", test_split="train[80%:]").load()
    equal((rows_of(data.train)["x"], rows_of(data.test)["x"]), (X[:8], X[8:]))
    with pytest.raises(DataError, match="split dev: Unknown split.*'validation'"):
        source(path=named, test_split="dev")
    with pytest.raises(DataError, match=r"BuilderConfig 'en' not found"):
        source(path=named, config="en")


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_are_chosen_and_one_that_is_missing_is_named(tmp_path, streaming):
    write(tmp_path, datasets.Dataset.from_dict({"x": X, "name": ["a"] * len(X)}))

    def batch(*columns):
        found = source(tmp_path, columns=columns, streaming=streaming)
        if streaming:
            return next(iter(found.open_streams(2, 0, WHOLE).train))
        return found.load().train.take(np.arange(2))

    assert batch("x").keys() == {"x"}
    with pytest.raises(DataError, match="train: .*'y'"):
        batch("x", "y")


def test_rows_of_the_disk_have_numbers_in_32_bits(tmp_path, monkeypatch):
    made = datasets.Dataset.from_dict({"x": X, "y": Y, "name": ["a"] * len(X)})
    with pytest.raises(DataError, match="'name' of the data is <U1"):
        RowExamples(made).take(np.array([0]))
    write(tmp_path, made)
    found = source(tmp_path, columns=["x", "y"])
    data = found.load().train
    equal(rows_of(data), {"x": X, "y": Y.astype(np.int32)})
    assert spec_of(data) == found.spec
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs datasets, .*jddp\[data\]"):
        source(tmp_path)


def test_data_of_the_network_are_refused_without_it_and_no_script_is_run(tmp_path):
    with refused(DataError, r"split train: .*network, .*HF_HOME"):
        source(path="ylecun/mnist", revision="main")
    script = f"open({str(tmp_path / 'ran')!r}, 'w')"
    write_images(tmp_path / "scripted", {"scripted.py": script.encode()})
    with pytest.raises(DataError, match="scripts are no longer supported"):
        source(path=str(tmp_path / "scripted"))
    assert not (tmp_path / "ran").exists()


def test_arguments_that_do_not_belong_together_are_refused():
    for kwargs, message in (
        ({}, r"data\.dir, or .*data\.kwargs\.path"),
        ({"directory": "here", "path": "ylecun/mnist"}, "Give one of the two"),
        ({"directory": "here", "streaming": True, "test_share": 0.5}, "test_share=0.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            source(**kwargs)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def column_of_kind(kind, name="other", **stored):
    """A column of numbers and one of another kind, which has this one value."""
    plain = datasets.Features({"bytes": datasets.Value("binary"), "path": datasets.Value("string")})
    features = datasets.Features({"x": datasets.Value("float32"), name: plain})
    stored = {"bytes": None, "path": None} | stored
    made = datasets.Dataset.from_dict({"x": [1.0], name: [stored]}, features=features)
    return made.cast_column(name, kind)


def test_an_image_that_is_a_program_of_another_format_starts_nothing(tmp_path, monkeypatch):
    """Ghostscript would leave a file, where a program of that name is on the path."""
    write_images(tmp_path, {"gs": f"#!/bin/sh\ntouch {tmp_path}/started\nexit 1\n".encode()})
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    write(tmp_path, column_of_kind(datasets.Image(), "image", bytes=EPS))
    for part in BOTH:
        write_images(tmp_path / part, {"cat/b.png": EPS})
    with pytest.raises(DataError, match="'image': not a whole image"):
        source(tmp_path)
    with pytest.raises(DataError, match=r"b\.png: not a whole image"):
        rows_of(source(tmp_path, "image_folder", image_size=8).load().train)
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("kind", "stored", "message"),
    [
        (datasets.Image(), {"path": "http://127.0.0.1:9/cat.png"}, "only a path"),
        (datasets.Audio(), {"bytes": b"RIFF"}, "'other' is Audio.*columns"),
    ],
)
def test_a_column_that_would_be_fetched_or_decoded_by_others_is_refused_or_left_out(
    tmp_path, kind, stored, message
):
    (tmp_path / "rows").mkdir()
    for part in BOTH:
        table = column_of_kind(kind, **stored).data.table
        pyarrow.parquet.write_table(table, tmp_path / "rows" / f"{part}.parquet")
    path = str(tmp_path / "rows")
    with pytest.raises(DataError, match=message):
        source(path=path)
    assert rows_of(source(path=path, columns=["x"]).load().train)["x"].tolist() == [1.0]


def damaged(data, rng):
    """The bytes of a file, cut or with others in the place of some that are not zero."""
    data = bytearray(data)
    places = [place for place, byte in enumerate(data) if byte]
    if rng.random() < 0.3:
        return data[: rng.choice(places)]
    for _ in range(rng.choice([3, 20])):
        data[rng.choice(places)] = rng.randrange(256)
    return data


@pytest.mark.parametrize("name", ["hugging_face", "webdataset"])
def test_damaged_files_are_refused_in_one_line(tmp_path, name, capfd):
    (sound := tmp_path / "sound").mkdir()
    if name == "hugging_face":
        write(sound, datasets.Dataset.from_dict({"x": np.ones((50, 3), np.float32), "y": [1] * 50}))
    else:
        write_tars(sound, photos(range(20)))
    kwargs = {"image_size": 8} if name == "webdataset" else {}
    refused = []
    for seed in range(12):
        rng, copy = random.Random(seed), tmp_path / f"copy-{seed}"
        shutil.copytree(sound, copy)
        file = rng.choice(sorted(x for x in copy.rglob("*") if x.is_file()))
        file.write_bytes(damaged(file.read_bytes(), rng))
        try:
            rows_of(source(copy, name, **kwargs).load().train)
        except Error as error:
            refused.append(error)
    assert len(refused) > 3
    assert {error.exit_code for error in refused} == {65}, refused
    assert not [error for error in refused if "\n" in str(error)]
    assert "Traceback" not in capfd.readouterr().err


def write_tars(folder, members):
    for part in BOTH:
        write_tar(folder / f"{part}.tar", members)


def streams(directory, size, seed=0, share=WHOLE, **kwargs):
    return source(directory, streaming=True, **kwargs).open_streams(size, seed, share)


def first(num_batches, batches):
    return [batch["x"] for batch in itertools.islice(batches, num_batches)]


def test_a_stream_is_endless_for_training_and_one_pass_for_testing(saved, named):
    for place in ({"directory": saved}, {"directory": None, "path": named}):
        both = streams(size=4, test_split="validation", **place)
        equal(np.concatenate(first(7, both.train)), np.concatenate([X, X, X])[:28])
        for _ in range(2):
            equal(np.concatenate(first(9, both.test)), X[4:6])


def test_each_epoch_of_a_stream_has_its_files_in_their_order_and_resumes_anywhere(tmp_path):
    """Of three files, whose order `datasets` would change from the third epoch on."""
    for i, x in enumerate((X[:3], X[3:6], X[6:])):
        datasets.Dataset.from_dict({"x": x}).to_parquet(str(tmp_path / "files" / f"{i}.parquet"))
    files = {"directory": None, "path": str(tmp_path / "files"), "size": 4, "test_split": "train"}
    whole = np.concatenate([X] * 6)
    for num_before in (0, 1, 2, 3, 4, 5, 9):
        before, after = (streams(**files).train for _ in range(2))
        first(num_before, before)
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        equal(np.concatenate(first(15 - num_before, after)), whole[4 * num_before :])


def test_processes_read_parts_of_the_same_global_batches_and_resume_from_one_position(saved):
    whole = streams(saved, 4)
    parts = [streams(saved, 4, test_split="train", share=Share(i, 2)) for i in range(2)]
    both = zip(*(first(6, part.train) for part in parts), strict=True)
    equal([np.concatenate(x) for x in both], first(6, whole.train))
    assert parts[0].train.state_dict() == parts[1].train.state_dict()
    rows = [first(9, part.test) for part in parts]
    assert [[len(x) for x in part] for part in rows] == [[2, 2, 2], [2, 2, 0]]
    equal(np.concatenate([np.concatenate(pair) for pair in zip(*rows, strict=True)]), X)


PHOTO = np.arange(24 * 20 * 3, dtype=np.uint8).reshape(24, 20, 3)
JPEG = file_of(PHOTO, "JPEG")


def photos(numbers):
    members = {}
    for number in numbers:
        name = f"class{number % 2}/{number:03}"
        members[f"{name}.jpg"] = file_of(np.roll(PHOTO, number, axis=0), "JPEG")
        members[f"{name}.cls"] = b"%d" % (number % 2)
    return members


@pytest.fixture
def shards(tmp_path):
    (folder := tmp_path / "tars").mkdir()
    for name, first in (("train-0", 0), ("train-1", 10), ("test", 0)):
        write_tar(folder / f"{name}.tar", photos(range(first, first + 10)))
    return folder


def tars(folder, **kwargs):
    return source(folder, "webdataset", **({"image_size": 8} | kwargs))


def test_a_tar_file_has_the_rows_of_the_same_files_in_folders(tmp_path):
    members = dict(sorted(photos(range(12)).items()))
    write_tars(tmp_path, members)
    for part in BOTH:
        write_images(tmp_path / part, {x: y for x, y in members.items() if x.endswith(".jpg")})
    folder, found = source(tmp_path, "image_folder", image_size=8), tars(tmp_path)
    assert (found.spec, found.sizes, found.augment) == (folder.spec, folder.sizes, folder.augment)
    for part in BOTH:
        one, other = getattr(found.load(), part), getattr(folder.load(), part)
        equal(rows_of(one), rows_of(other))
        np.testing.assert_array_equal(one.column("label"), other.column("label"))


def test_samples_are_read_in_any_order_and_a_share_is_held_back(shards):
    train = tars(shards).load().train
    order = np.array([19, 3, 3, 12])
    sent = pickle.loads(pickle.dumps(train))  # to a worker
    equal(sent.take(order), {name: x[order] for name, x in rows_of(train).items()})
    assert train.take(np.zeros(0, int))["image"].shape == (0, 8, 8, 3)
    shared = tars(shards, test_share=0.25).load()
    assert len(shared.train) + len(shared.test) == 30
    assert 2 <= len(shared.test) <= 15


def test_names_of_members_follow_the_format(tmp_path):
    members = {"a/b.c/1.JPG": JPEG, "a/b.c/1.cls": b" 1\n"}
    write_tars(tmp_path, {".hidden.jpg": b"", "no_ending": b"", **members})
    assert rows_of(tars(tmp_path).load().train)["label"].tolist() == [1]


@pytest.mark.slow
@pytest.mark.usefixtures("started_devices")
def test_a_run_of_tar_files_predicts_a_folder_of_images(shards, tmp_path):
    data = {"name": "webdataset", "dir": str(shards), "kwargs": {"image_size": 8}}
    config = Config(data={**data, "global_batch_size": 8}, model={"name": "mlp"}, **ONE_STEP)
    run = train(config, **{"run.dir": str(tmp_path / "run")})
    write_images(tmp_path / "new", {"a/1.jpg": JPEG, "b.jpg": JPEG})
    assert predict_file(run.run_dir, tmp_path / "new", tmp_path / "out.csv") == 2


LAST_HAS_NONE = {f"{i}.{end}": x for i in range(7) for end, x in (("jpg", JPEG), ("cls", b"1"))}


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"1.jpg": JPEG, "1.png": JPEG, "1.cls": b"1"}, "members jpg, png, cls"),
        ({"1.jpg": JPEG, "1.cls": b"cat"}, "invalid literal"),
        ({"1.jpg": JPEG, "1.cls": str(2**40).encode()}, "which needs 64 bits"),
        ({"22.05.jpg": JPEG, "22.05.cls": b"1"}, "05.jpg, 05.cls.*ends at its first dot"),
        ({"1.jpg": b"1", "1.txt": b""}, "members jpg, txt"),
        (LAST_HAS_NONE | {"7.jpg": JPEG}, "members jpg, cls"),
        ({"cat/1.jpg": b"no image", "cat/1.cls": b"0"}, r"train\.tar: cat/1: not a whole image"),
    ],
)
def test_bad_samples_are_refused(tmp_path, members, message):
    write_tars(tmp_path, members)
    with pytest.raises(DataError, match=message):
        tars(tmp_path)
