"""A full disk, or one that cannot be written, costs checkpoints alone; a run has one writer."""

import contextlib
import os
import shutil
import signal
import subprocess

import pytest

from faults.jobs import Job, assert_same_run

pytestmark = [pytest.mark.processes, pytest.mark.slow]
OFTEN = "checkpoint.every_steps=20"
LONG = ["checkpoint.every_steps=50", "train.num_steps=2000"]


@pytest.fixture
def small_disk(folder):
    """`small_disk(name)` puts a disk of two megabytes there, with what the folder held."""
    with contextlib.ExitStack() as mounted:

        def mount(name):
            path, held = folder / name, folder / "held"
            path.mkdir(exist_ok=True)
            path.rename(held)
            path.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path], check=True)
            mounted.callback(subprocess.run, ["umount", "--lazy", path], check=True)
            shutil.copytree(held, path, dirs_exist_ok=True)
            return path

        yield mount


@contextlib.contextmanager
def full(disk, job):
    """A disk without room, until the end of the block."""
    descriptor = os.open(disk / "filler", os.O_CREAT | os.O_WRONLY)
    with contextlib.suppress(OSError):
        while True:
            os.write(descriptor, bytes(512))
    os.close(descriptor)
    yield "No space left on device"
    (disk / "filler").unlink()


@contextlib.contextmanager
def read_only(disk, job):
    remount = ["mount", "-o", "remount,ro", disk]  # refused while a file there is being written
    job.wait_for(lambda: subprocess.run(remount, stderr=subprocess.DEVNULL).returncode == 0)
    yield "Read-only file system"
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)


def test_a_run_continues_without_its_disk_and_saves_when_it_can(folder, golden, small_disk):
    with Job(folder, *LONG) as job:
        job.wait_for(job.saved)
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.codes() == [75], job.outputs
    disk, stopped = small_disk("run/checkpoints"), job.last_saved()
    with Job(folder, *LONG) as job:
        job.wait_for_saved(stopped + 1)
        for fault in (full, read_only):
            with fault(disk, job) as text:
                broken_at = job.num_steps()
                job.wait_for_step(broken_at + 150)
                assert job.last_saved() <= broken_at + 50  # a save that had its room before
            assert text in job.said()
            job.wait_for_saved(broken_at + 151)
        assert job.codes() == [0], job.outputs
    assert "cannot be saved: process 0: " in job.said()
    assert "Earlier checkpoints stay" in job.said()
    assert job.said().count("cannot be saved") == 2  # a line for each kind, not for each save
    assert "Traceback" not in job.said()
    assert_same_run(job, golden(LONG[1]))


def test_a_run_directory_that_is_full_is_reported_once_for_each_kind_of_failure(folder, small_disk):
    disk = small_disk("run")
    with Job(folder, OFTEN) as job:
        job.wait_for(job.saved)
        with full(disk, job):
            assert job.codes() == [74], job.outputs
    said = job.outputs[0][1]
    failed = [x.split("run/")[1].split(":")[0] for x in said.splitlines() if "cannot be" in x]
    # Checkpoints once more, as what ends the command; and the records that are lost.
    logs = ["logs/events.jsonl", "logs/process_0.log"]
    assert sorted(failed) == [*["checkpoints"] * 2, *logs, *["metrics.jsonl"] * 2]
    assert "Traceback" not in said


def test_checkpoints_that_somebody_removes_are_made_anew(folder, golden):
    with Job(folder, OFTEN) as job:
        job.wait_for(lambda: len(job.saved()) > 1)
        (job.run_dir / "checkpoints").rename(folder / "removed")  # at once, inside a save perhaps
        job.wait_for_saved(job.num_steps() + 1)
        assert job.codes() == [0], job.outputs
    assert_same_run(job, golden())


def test_a_second_job_in_the_same_directory_is_refused_and_disturbs_nothing(folder, golden):
    with Job(folder) as job:
        job.wait_for_step(20)
        job.processes[0].send_signal(signal.SIGSTOP)  # or it might be over before the other looks
        with Job(folder) as second:
            assert second.codes() == [2], second.outputs
        assert f"is in use by process {job.processes[0].pid} on " in second.said()
        assert "Wait until it ends, or choose another run.dir" in second.said()
        job.processes[0].send_signal(signal.SIGCONT)
        assert job.codes() == [0], job.outputs
    assert_same_run(job, golden())
