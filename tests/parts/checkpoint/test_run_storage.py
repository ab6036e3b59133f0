"""A run directory is used the same way in a folder and at a URL."""

import functools

import pytest

from jddp.checkpoint import folders
from jddp.checkpoint.folders import surplus
from jddp.checkpoint.storage import local_copy, storage_at


@pytest.fixture(params=["", "file://"])
def where(request, tmp_path):
    return f"{request.param}{tmp_path / 'run'}"


def save(storage, step):
    folder = storage.folder / "checkpoints" / str(step)
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(f'{{"step": {step}}}\n')
    folders.seal(folder)
    storage.publish(folder)


def test_what_one_process_keeps_another_finds(where):
    one = storage_at(where)
    one.folder.mkdir(exist_ok=True)
    one.claim()
    (one.folder / "metrics.jsonl").write_text("{}\n")
    one.upload()
    save(one, 10)
    save(one, 20)
    another = storage_at(where)
    another.check()
    another.fetch()
    assert (another.folder / "metrics.jsonl").read_text() == "{}\n"
    assert folders.find_damage(another.folder / "checkpoints" / "20") is None
    assert another.is_shared == (another.folder == one.folder)
    assert str(one.name) in (where, str(one.folder))


def test_every_checkpoint_is_copied_but_those_that_are_not_to_be_kept(where):
    storage = storage_at(where)
    save(storage, 10)
    save(storage, 20)
    there = {path.name for path in (local_copy(where) / "checkpoints").iterdir()}
    assert there == {"10", "20"}
    storage.remove_surplus("checkpoints", 20, functools.partial(surplus, keep=1))
    there = {path.name for path in (local_copy(where) / "checkpoints").iterdir()}
    # From a folder that is shared, whoever saves has removed them.
    assert there == ({"10", "20"} if storage.is_shared else {"20"})


def test_the_folder_is_named_as_it_was_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(storage_at("runs/mine").name) == "runs/mine"
    assert str(storage_at(tmp_path / "runs" / "mine").name) == "runs/mine"
    assert storage_at(tmp_path.parent / "mine").name == tmp_path.parent / "mine"
