"""Data sets of Hugging Face: saved to disk, by name, as streams. Nothing here has a network."""

import io
import itertools
import json

import datasets
import numpy as np
import pytest

from jddp.data import make_source
from jddp.data.batches import Share
from jddp.ground.errors import ConfigError, DataError

X = np.arange(30, dtype=np.float32).reshape(10, 3)
SHARE = Share(0, 1)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No network."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def splits():
    parts = {"train": X, "test": X[:4], "validation": X[4:6]}
    return datasets.DatasetDict({k: datasets.Dataset.from_dict({"x": x}) for k, x in parts.items()})


def source(directory=None, **kwargs):
    return make_source("hugging_face", directory=directory and str(directory), kwargs=kwargs)


def read(examples):
    return examples.take(np.arange(len(examples)))["x"]


def test_a_saved_dictionary_of_data_sets_is_read_with_splits_of_any_names(tmp_path, splits):
    splits.save_to_disk(str(tmp_path / "saved"))
    data = source(tmp_path / "saved").load()
    np.testing.assert_array_equal(read(data.train), X)
    np.testing.assert_array_equal(read(data.test), X[:4])
    data = source(tmp_path / "saved", train_split="test", test_split="validation").load()
    np.testing.assert_array_equal(read(data.train), X[:4])
    np.testing.assert_array_equal(read(data.test), X[4:6])
    with pytest.raises(DataError, match=r"no such folder.*are: test, train, validation\."):
        source(tmp_path / "saved", test_split="valid")


def test_a_data_set_is_found_by_its_name_with_splits_and_parts_of_them(tmp_path, splits):
    folder = tmp_path / "named"
    for name, rows in splits.items():
        rows.to_parquet(str(folder / f"{name}.parquet"))
    data = source(path=str(folder), train_split="train[:80%]", test_split="train[80%:]").load()
    np.testing.assert_array_equal(read(data.train), X[:8])
    np.testing.assert_array_equal(read(data.test), X[8:])
    with pytest.raises(DataError, match=r"named, split dev: Unknown split.*'validation'.*test_sp"):
        source(path=str(folder), test_split="dev")
    with pytest.raises(DataError, match=r"BuilderConfig 'en' not found.*data\.kwargs: path"):
        source(path=str(folder), config="en")


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_are_chosen_and_one_that_is_missing_is_named(tmp_path, streaming):
    made = datasets.Dataset.from_dict({"x": X, "name": ["a"] * len(X)})
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "named"))

    def batch(*columns):
        found = source(tmp_path / "named", columns=columns, streaming=streaming)
        if streaming:
            return next(iter(found.open_streams(2, 0, SHARE).train))
        return found.load().train.take(np.arange(2))

    assert batch("x").keys() == {"x"}
    with pytest.raises(DataError, match=r"named/train: .*'y'.* See data\.kwargs\.columns\."):
        batch("x", "y")


def test_without_a_network_one_line_says_how_to_get_the_data():
    with pytest.raises(DataError) as raised:
        source(path="ylecun/mnist", revision="main")
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith("ylecun/mnist, split train: Couldn't reach 'ylecun/mnist'")
    assert "datasets.load_dataset('ylecun/mnist', revision='main')" in message
    with pytest.raises(DataError, match=r"load_dataset\('nyu-mll/glue', 'sst2'\)"):
        source(path="nyu-mll/glue", config="sst2")


def test_the_script_of_a_data_set_is_not_run(tmp_path):
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "scripted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(DataError, match="scripts are no longer supported"):
        source(path=str(folder))
    assert not (tmp_path / "ran").exists()


def test_damaged_files_and_images_without_their_bytes_are_refused_by_name(tmp_path):
    from PIL import Image

    folder = tmp_path / "images"
    for part in ("train", "test"):
        (folder / part / "cat").mkdir(parents=True)
        Image.new("L", (4, 4)).save(folder / part / "cat" / "0.png")
    with pytest.raises(DataError, match="'image' is only a path, which is not read"):
        source(path=str(folder))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "train.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="broken, split train: Parquet magic bytes not found"):
        source(path=str(broken))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, r"reads a folder, data\.dir, or .*data\.kwargs\.path\. Give one"),
        ({"directory": "here", "path": "ylecun/mnist"}, "Give one of the two"),
        ({"directory": "here", "revision": "main"}, r"data\.kwargs\.revision=main belongs to"),
    ],
)
def test_a_folder_and_a_name_exclude_each_other(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        source(**kwargs)


def streams(directory, size, *, seed=0, share=SHARE, **kwargs):
    made = source(directory, streaming=True, **kwargs)
    return made.open_streams(size, seed, share)


def first(num_batches, batches):
    return [batch["x"] for batch in itertools.islice(batches, num_batches)]


@pytest.fixture
def saved(tmp_path, splits):
    splits.save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_a_stream_is_endless_for_training_and_one_pass_for_testing(tmp_path, splits, saved):
    for name, rows in splits.items():
        rows.to_parquet(str(tmp_path / "named" / f"{name}.parquet"))
    for place in ({"directory": saved}, {"directory": None, "path": str(tmp_path / "named")}):
        both = streams(size=4, test_split="validation", **place)
        rows = np.concatenate([X, X, X])[:28]
        np.testing.assert_array_equal(np.concatenate(first(7, both.train)), rows)
        for _ in range(2):
            np.testing.assert_array_equal(np.concatenate(first(9, both.test)), X[4:6])


def test_a_stream_that_resumes_has_the_batches_of_one_that_was_not_interrupted(saved):
    whole = first(9, streams(saved, 4).train)
    for num_before in range(9):
        before = streams(saved, 4).train
        assert len(first(num_before, before)) == num_before
        state = json.loads(json.dumps(before.state_dict()))
        after = streams(saved, 4).train
        after.load_state_dict(state)
        np.testing.assert_array_equal(first(9 - num_before, after), whole[num_before:])


@pytest.fixture
def files(tmp_path):
    """Three files, whose order `datasets` would change from the third epoch on."""
    for i, x in enumerate((X[:3], X[3:6], X[6:])):
        datasets.Dataset.from_dict({"x": x}).to_parquet(str(tmp_path / "files" / f"{i}.parquet"))
    return {"directory": None, "path": str(tmp_path / "files"), "test_split": "train"}


def test_each_epoch_of_a_stream_has_its_files_in_their_order(files):
    whole = np.concatenate([X] * 6)
    np.testing.assert_array_equal(np.concatenate(first(15, streams(size=4, **files).train)), whole)
    for num_before in (3, 5, 9):  # in the second epoch, at its end, in the fourth
        before = streams(size=4, **files).train
        first(num_before, before)
        after = streams(size=4, **files).train
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        rest = np.concatenate(first(15 - num_before, after))
        np.testing.assert_array_equal(rest, whole[4 * num_before :])


def test_processes_read_parts_of_the_same_global_batches_and_resume_from_one_position(saved):
    whole = streams(saved, 4)
    parts = [streams(saved, 4, share=Share(i, 2)) for i in range(2)]
    both = zip(*(first(6, part.train) for part in parts), strict=True)
    np.testing.assert_array_equal([np.concatenate(x) for x in both], first(6, whole.train))
    assert parts[0].train.state_dict() == parts[1].train.state_dict()
    tests = [streams(saved, 4, test_split="train", share=Share(i, 2)).test for i in range(2)]
    rows = [first(9, test) for test in tests]
    assert [[len(x) for x in part] for part in rows] == [[2, 2, 2], [2, 2, 0]]
    np.testing.assert_array_equal(
        np.concatenate([np.concatenate(pair) for pair in zip(*rows, strict=True)]), X
    )
    with pytest.raises(ConfigError, match="=5 does not divide over 2 processes"):
        streams(saved, 5, share=Share(0, 2))


def test_a_shuffled_stream_follows_its_seed_and_warns_that_it_does_not_resume_exactly(
    saved, caplog
):
    def epochs(seed, **kwargs):
        made = streams(saved, 5, seed=seed, shuffle_buffer=10, **kwargs).train
        found = np.concatenate(first(4, made))[:, 0]
        return made, found[:10], found[10:]

    made, one, two = epochs(3)
    assert sorted(one) == sorted(two) == sorted(X[:, 0])
    assert not np.array_equal(one, two)
    np.testing.assert_array_equal(one, epochs(3)[1])
    assert not np.array_equal(one, epochs(4)[1])
    assert caplog.text.count("it does not resume exactly") == 3
    made.load_state_dict(made.state_dict())
    assert len(first(1, made)) == 1
    assert caplog.text.count("it does not resume exactly") == 3  # once for each stream
    assert "buffer will be refilled" in caplog.text  # by datasets
    halves = [
        np.concatenate(first(5, streams(saved, 2, shuffle_buffer=4, share=Share(i, 2)).train))
        for i in range(2)
    ]
    assert sorted(np.concatenate(halves)[:, 0]) == sorted(X[:, 0])


def test_a_shuffled_stream_begins_its_next_epoch_on_another_number_of_processes(saved, caplog):
    one = streams(saved, 2, shuffle_buffer=4, share=Share(0, 2)).train
    first(2, one)
    alone = streams(saved, 2, shuffle_buffer=4).train
    alone.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert "was read by 2 processes and now is by 1" in caplog.text
    assert not alone.resumes_exactly
    assert streams(saved, 2).train.resumes_exactly
    rows = np.concatenate(first(5, alone))[:, 0]
    assert sorted(rows) == sorted(X[:, 0])
    again = streams(saved, 2, shuffle_buffer=4).train
    again.load_state_dict({"epoch": 0, "rows": {}, "num_processes": 2})
    np.testing.assert_array_equal(np.concatenate(first(5, again))[:, 0], rows)


def test_images_of_a_stream_are_decoded_here_and_sound_is_refused(tmp_path):
    from PIL import Image

    file = io.BytesIO()
    Image.new("L", (3, 2), 7).save(file, "PNG")
    column = datasets.Image()
    for part in ("train", "test"):
        rows = {"image": [{"bytes": file.getvalue(), "path": None}] * 4, "label": [0, 1, 0, 1]}
        made = datasets.Dataset.from_dict(rows).cast_column("image", column)
        made.save_to_disk(str(tmp_path / part))
    batch = next(iter(streams(tmp_path, 2).train))
    np.testing.assert_array_equal(batch["image"], np.full((2, 2, 3), 7, np.uint8))
    np.testing.assert_array_equal(batch["label"], np.array([0, 1], np.int32))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"streaming": True, "test_share": 0.5}, "test_share=0.5 divides numbered examples"),
        ({"streaming": True, "shuffle_buffer": 0}, "shuffle_buffer=0 holds no row"),
        ({"shuffle_buffer": 10}, "shuffle_buffer=10 is for data.kwargs.streaming=true"),
    ],
)
def test_arguments_of_the_other_kind_of_reading_are_refused(saved, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        source(saved, **kwargs)
