"""A disk that is full, or cannot be written for a while, costs checkpoints alone."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import pytest
from runs import environment

from faults.jobs import Job, assert_same_run

pytestmark = [pytest.mark.processes, pytest.mark.slow]

LONG = ["checkpoint.every_steps=50", "train.num_steps=4000"]


@pytest.fixture
def small_disk():
    """`small_disk(path)` puts a disk of two megabytes there, with what the folder held."""
    mounted = []

    def mount(path):
        held = path.with_name("held")
        shutil.move(path, held)
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path], check=True)
        mounted.append(path)
        for folder in held.iterdir():
            copy = shutil.copytree if folder.is_dir() else shutil.copy
            copy(folder, path / folder.name)

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(path):
    """Writes until nothing more fits."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    with contextlib.suppress(OSError):
        while True:
            os.write(descriptor, bytes(512))
    os.close(descriptor)


def fill_up(disk):
    """Leaves no room; the end of the block makes some."""
    fill(disk / "filler")
    yield "No space left on device"
    (disk / "filler").unlink()


def read_only(disk):
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    yield "Read-only file system"
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)


@pytest.mark.parametrize("fault", [fill_up, read_only])
def test_a_run_continues_without_its_disk_and_saves_when_it_can(folder, golden, small_disk, fault):
    with Job(folder, *LONG) as job:
        job.wait_for(lambda: job.saved())
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.codes() == [75], job.outputs
    checkpoints, stopped = job.run_dir / "checkpoints", max(job.saved())
    small_disk(checkpoints)
    with Job(folder, *LONG) as job:
        job.wait_for(lambda: max(job.saved(), default=0) > stopped)
        with contextlib.contextmanager(fault)(checkpoints) as told:
            broken_at = job.num_steps()
            job.wait_for(lambda: job.num_steps() >= broken_at + 150)
            saved_meanwhile = max(job.saved(), default=0)
            assert saved_meanwhile <= broken_at + 50  # a save that had its room before
        job.wait_for(lambda: max(job.saved(), default=0) > broken_at + 150)
        assert job.codes() == [0], job.outputs
    assert "cannot be saved: process 0: " in job.outputs[0][1]
    assert told in job.outputs[0][1]
    assert "Earlier checkpoints stay" in job.outputs[0][1]
    assert job.outputs[0][1].count("cannot be saved") == 1  # a line for the kind, not for each save
    assert "Traceback" not in job.outputs[0][1]
    assert_same_run(job, golden(*LONG))


def test_a_run_directory_that_fills_up_is_reported_in_a_line_for_each_kind_of_failure(
    folder, golden, small_disk
):
    with Job(folder, *LONG) as job:
        job.wait_for(lambda: job.saved())
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.codes() == [75], job.outputs
    stopped = max(job.saved())
    small_disk(job.run_dir)
    with Job(folder, *LONG) as job:
        job.wait_for(lambda: max(job.saved(), default=0) > stopped)
        with contextlib.contextmanager(fill_up)(job.run_dir):
            (code,) = job.codes()
    told = [line for line in job.outputs[0][1].splitlines() if "cannot be" in line]
    assert code == 74
    assert sorted(line.split("run/")[1].split(":")[0] for line in told) == [
        "checkpoints",
        "checkpoints",  # and once more, as what ends the command
        "logs/process_0.log",
        "metrics.jsonl",
    ]
    assert "Traceback" not in job.outputs[0][1]


@pytest.mark.parametrize("redirection", ["| head -n 1", ">/dev/full", ">&-"])
def test_a_run_continues_without_its_standard_output(folder, golden, redirection):
    command = f"{sys.executable} -m jddp.train --config job.yaml run.dir=run"
    done = subprocess.run(
        ["bash", "-c", f"{command} {redirection}; exit ${{PIPESTATUS[0]}}"],
        cwd=folder,
        env=environment(XDG_CACHE_HOME=(folder / "cache").read_text()),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    job = Job(folder, num_processes=0)
    assert_same_run(job, golden())


def test_checkpoints_that_somebody_removes_are_made_anew(folder, golden):
    with Job(folder, *LONG) as job:
        job.wait_for(lambda: len(job.saved()) > 1)
        (job.run_dir / "checkpoints").rename(folder / "removed")  # at once, inside a save perhaps
        removed_at = job.num_steps()
        job.wait_for(lambda: max(job.saved(), default=0) > removed_at)
        assert job.codes() == [0], job.outputs
    assert_same_run(job, golden(*LONG))
