"""What is at a URL is complete at every moment, and what is fetched is what was uploaded."""

import functools
import itertools
import os

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from runs import contents

from jddp.checkpoint import folders
from jddp.checkpoint.folders import finished, surplus
from jddp.checkpoint.storage import Remote, local_copy
from jddp.ground.errors import ConfigError, FileSystemError
from jddp.trainer.reports.run_directory import RunDirectory

NUMBERS = itertools.count()


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    below = f"/{next(NUMBERS)}" if request.param == "memory" else tmp_path / "there"
    return f"{request.param}://{below}"


def put(remote, step, text="arrays", folder="checkpoints", **kept):
    checkpoint = remote.folder / folder / str(step)
    (checkpoint / "state").mkdir(parents=True)
    (checkpoint / "state" / "d").write_text(text)
    (checkpoint / "run.json").write_text(f'{{"step": {step}}}\n')
    folders.seal(checkpoint)
    remote.publish(checkpoint)
    keep = functools.partial(surplus, **{"keep": 3, **kept})
    remote.remove_surplus(checkpoint.parent.name, int(checkpoint.name), keep)


def complete(url):
    """The steps of the checkpoints at the URL, none of which is damaged."""
    folder = local_copy(url) / "checkpoints"
    steps = finished(folder) if folder.exists() else []
    assert not any(folders.find_damage(folder / str(step)) for step in steps)
    return steps


def test_what_was_uploaded_is_fetched_elsewhere_as_far_as_it_is_kept(url):
    here = Remote(url)
    (here.folder / "config.yaml").write_text("a: 1\n")
    (here.folder / "logs").mkdir()
    (here.folder / "logs" / "process_0.log").write_text("begun\n")
    (here.folder / "lock").write_text("process 1")
    for step in (10, 20):
        put(here, step, f"arrays of {step}")
    put(here, 10, folder="best", keep=1)
    there = Remote(url)
    there.fetch()
    files = {str(path) for path in contents(there.folder)}
    besides = {path for path in files if not path.startswith("checkpoints/20/")}
    assert besides == {"config.yaml", "logs/process_0.log"}  # to which the next attempt appends
    newest = contents(there.folder / "checkpoints" / "20")
    assert newest == contents(here.folder / "checkpoints" / "20")
    whole = {str(path) for path in contents(local_copy(url))}
    assert whole == {str(path) for path in contents(here.folder)} - {"lock"}
    for step in (30, 45):
        put(here, step, keep=2, keep_every=20)
    assert complete(url) == [20, 30, 45]
    put(here, 40, keep=2)  # as of a run that resumed from 30
    assert complete(url) == [30, 40]


@pytest.mark.parametrize("num_writes", range(9))
def test_wherever_the_connection_is_cut_what_is_complete_is_whole(monkeypatch, num_writes):
    def cut(write):
        def of_few(*arguments, **options):
            if next(numbers) >= num_writes:
                raise RuntimeError("Could not connect\nto the endpoint")
            write(*arguments, **options)

        return of_few

    url, numbers = f"memory:///{next(NUMBERS)}", itertools.count()
    put(Remote(url), 10, keep=1)
    put(Remote(url), 20, "of a run that was begun anew", keep=2)
    for name in ("put_file", "rm_file"):
        monkeypatch.setattr(MemoryFileSystem, name, cut(getattr(MemoryFileSystem, name)))
    # Three files of the older 20 are removed, three are uploaded, and three of 10 are removed.
    done = "written" if num_writes < 6 else "cleared of old checkpoints"
    with pytest.raises(FileSystemError, match=f"{url} cannot be {done}: Could not connect$"):
        put(Remote(url), 20, keep=1)
    monkeypatch.undo()
    assert complete(url) == ([10, 20] if num_writes in (0, 6) else [20] if num_writes > 6 else [10])
    put(Remote(url), 20, "at last", keep=1)
    assert complete(url) == [20]


def test_the_newest_that_is_undamaged_is_fetched_with_those_that_are_not(url):
    remote = Remote(url)
    for step in (10, 20, 30):
        put(remote, step)
    for name in ("30/state/d", "20/SHA256SUMS"):
        files, root = fsspec.core.url_to_fs(f"{url}/checkpoints/{name}")
        files.pipe_file(root, b"damaged")
    there = Remote(url)
    there.fetch()
    assert finished(there.folder / "checkpoints") == [10, 20, 30]
    assert folders.find_damage(there.folder / "checkpoints" / "30")


def test_a_run_writes_nothing_where_another_has_started_since(url):
    first, second = Remote(url), Remote(url)
    first.claim()
    put(first, 10)
    second.claim()
    put(second, 20, "of the second")
    files, root = fsspec.core.url_to_fs(url)
    before = {path: files.cat_file(path) for path in files.find(root)}
    (first.folder / "config.yaml").write_text("a: 1\n")
    this = f"process {os.getpid()} on .* has started a run there since"
    for change in (
        first.upload,
        lambda: put(first, 20),
        lambda: first.remove_surplus("checkpoints", 20, functools.partial(surplus, keep=1)),
    ):
        with pytest.raises(FileSystemError, match=this):
            change()
    assert {path: files.cat_file(path) for path in files.find(root)} == before
    put(second, 30)
    files.rm_file(f"{root}/lock")  # by a user who has seen that nothing runs there
    put(second, 40)
    assert complete(url) == [20, 30, 40]


def test_a_run_of_another_config_is_refused_at_a_url_before_the_first_is_ended(url):
    first, second, third = (RunDirectory(url, is_writer=True) for _ in range(3))
    with first.held({"a": 1}, {}):
        put(first.storage, 10)
    with pytest.raises(ConfigError, match="a run of another config"), second.held({"a": 2}, {}):
        pass
    put(first.storage, 20)
    with third.held({"a": 1}, {}):
        pass
    with pytest.raises(FileSystemError, match="has started a run there since"):
        put(first.storage, 30)
    assert complete(url) == [10, 20]


def test_a_folder_there_that_is_no_checkpoint_is_left_alone(url):
    remote = Remote(url)
    files, root = fsspec.core.url_to_fs(f"{url}/checkpoints/5.damaged")
    files.makedirs(root)
    files.pipe_file(f"{root}/{folders.SUMS}", b"of a local run that was copied here")
    for step in (10, 20):
        put(remote, step, keep=1)
    assert complete(url) == [20]
    assert files.exists(f"{root}/{folders.SUMS}")


def test_names_that_lead_out_of_the_folder_are_left_there(monkeypatch):
    remote = Remote("memory:///out")
    names = "{0}/../x", "{0}/a/../../y"
    monkeypatch.setattr(type(remote._files), "find", lambda _, x: [n.format(x) for n in names])
    remote.fetch()
    assert contents(remote.folder) == {}


@pytest.mark.parametrize("url", ["nothing://bucket/run", "gs://bucket/run"])
def test_a_url_without_its_packages_is_refused_in_one_line(url):
    with pytest.raises(ConfigError, match=rf"\A{url}: .* or give a folder\.\Z"):
        Remote(url)
