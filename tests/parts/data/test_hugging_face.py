"""Data sets of Hugging Face: saved to disk, by name, as streams. Nothing here has a network."""

import datasets
import numpy as np
import pytest

from jddp.data import make_source
from jddp.errors import ConfigError, DataError

X = np.arange(30, dtype=np.float32).reshape(10, 3)


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """No network, and a cache of its own."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


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


def test_without_a_network_one_line_says_how_to_get_the_data():
    with pytest.raises(DataError) as raised:
        source(path="ylecun/mnist", revision="main")
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith("ylecun/mnist, split train: Couldn't reach 'ylecun/mnist'")
    assert "datasets.load_dataset('ylecun/mnist')" in message


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
