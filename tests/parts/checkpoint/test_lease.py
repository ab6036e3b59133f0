"""One process holds a URL; another is refused while it lives, and takes over once it does not."""

import itertools
import os

import fsspec
import pytest
from runs import wait_until

from jddp.checkpoint import lease
from jddp.checkpoint.lease import Lease
from jddp.checkpoint.remote import Remote
from jddp.errors import ConfigError, FileSystemError
from jddp.trainer.reports.run_directory import RunDirectory

NUMBERS = itertools.count()


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.5)
    below = f"/leases/{next(NUMBERS)}" if request.param == "memory" else tmp_path / "there"
    return f"{request.param}://{below}"


def lock_of(url):
    files, root = fsspec.core.url_to_fs(url)
    return files, f"{root}/lock"


def test_a_second_run_is_refused_and_writes_nothing_until_the_first_has_ended(url):
    first, second = (RunDirectory(url, is_writer=True) for _ in range(2))
    with first.held():
        (second.path / "logs").mkdir()
        (second.path / "logs" / "process_0.log").write_text("second")
        reason = f"run.dir {url} is in use by process {os.getpid()} on .* Wait until it ends"
        with pytest.raises(ConfigError, match=reason), second.held():
            pytest.fail("it is held")
        files, lock = lock_of(url)
        assert files.find(lock.removesuffix("/lock")) == [lock]
    assert not files.exists(lock)
    with second.held():
        assert files.exists(lock)


def test_what_a_killed_process_has_left_is_taken_over(url):
    files, lock = lock_of(url)
    files.makedirs(lock.removesuffix("/lock"), exist_ok=True)
    files.pipe_file(lock, b"process 1 on a host that is gone\nabc\n7")
    with Lease(files, lock, url):
        assert f"process {os.getpid()} on " in files.cat_file(lock).decode()


def test_a_process_that_was_taken_for_dead_writes_no_more(url):
    remote, (files, lock) = Remote(url), lock_of(url)
    with remote.held():
        (remote.folder / "config.yaml").write_text("a: 1\n")
        remote.upload()
        (remote.folder / "config.yaml").write_text("a: 11\n")

        def is_refused():
            files.pipe_file(lock, b"process 2 on h2\nabc\n")
            try:
                remote._lease.check()
            except OSError:
                return True

        wait_until(is_refused)
        with pytest.raises(FileSystemError, match="written: process 2 on h2 has taken over"):
            remote.upload()
    assert files.cat_file(lock).startswith(b"process 2")  # which is not this one's to remove
    assert files.cat_file(lock.replace("lock", "config.yaml")) == b"a: 1\n"
