import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys

import pytest
from runs import environment, files_up_to, run_python

from jddp.trainer.reports import run_directory as lock

IMPORTS = """
import os, sys, time
from pathlib import Path
from jddp.trainer.reports.run_directory import InUse, held
path = Path(sys.argv[1])
"""
HOLDS = """
with held(path):
    if sys.argv[2:] and os.fork():
        time.sleep(1000)  # the child reports, and outlives it
    print("holds", flush=True)
    time.sleep(1000)
"""
ASKS = """
try:
    with held(path):
        print("free")
except InUse as holder:
    print(holder)
"""
LEAVES = """
with held(path) as name:
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        assert path.read_text() == name != ""
if child:
    assert path.read_text() == ""
"""


def test_one_holder_at_a_time_in_one_process_too(tmp_path):
    with lock.held(path := tmp_path / "lock") as name:
        assert path.read_text() == name == f"process {os.getpid()} on {os.uname().nodename}\n"
        with pytest.raises(lock.InUse, match="^another run of this process$"), lock.held(path):
            pass
    assert path.read_text() == ""
    with lock.held(path):
        pass


def test_a_copy_of_the_directory_by_its_own_process_does_not_end_the_lock(tmp_path):
    def answer():
        return run_python("-c", IMPORTS + ASKS, path).stdout.strip()

    (path := tmp_path / "run" / "lock").parent.mkdir()
    with lock.held(path) as name:
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        path.read_bytes()
        assert answer() == name.strip()
    assert answer() == "free"


@pytest.mark.parametrize("child", [[], ["and forks"]], ids=["alone", "with a child that stays"])
def test_the_lock_ends_with_its_process_however_that_ends(tmp_path, child):
    command = [sys.executable, "-c", IMPORTS + HOLDS, path := tmp_path / "lock", *child]
    options = {"env": environment(), "text": True, "start_new_session": True}
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, **options)
    try:
        assert holder.stdout.readline() == "holds\n"
        with pytest.raises(lock.InUse, match=rf"^process {holder.pid} on "), lock.held(path):
            pass
        holder.kill()
        holder.wait()
        with lock.held(path):
            pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()
        holder.stdout.close()


def test_a_child_that_leaves_through_the_holder_s_code_takes_nothing_along(tmp_path):
    assert run_python("-c", IMPORTS + LEAVES, tmp_path / "lock").returncode == 0


def test_a_file_system_without_locks_is_reported_and_used(tmp_path, monkeypatch, caplog):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock.held(tmp_path / "lock"):
        assert caplog.messages == [f"{tmp_path}/lock cannot be locked: No locks available."]


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("text")
    (tmp_path / "lock").symlink_to("mine")
    with pytest.raises(OSError, match="symbolic link"), lock.held(tmp_path / "lock"):
        pass
    assert (tmp_path / "mine").read_text() == "text"


def test_on_a_full_disk_the_lock_holds_without_a_name(tmp_path):
    with files_up_to(0), lock.held(path := tmp_path / "lock") as name:
        assert name == path.read_text() == ""
        with pytest.raises(lock.InUse, match="^another process$"), lock.held(path):
            pass
