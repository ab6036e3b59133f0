"""A disk that is full costs checkpoints, and nothing else."""

import contextlib
import os
import shutil
import signal
import subprocess

import pytest

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
            shutil.copytree(folder, path / folder.name)

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


def test_a_run_goes_on_while_the_disk_is_full_and_saves_when_there_is_room(
    folder, golden, small_disk
):
    with Job(folder, *LONG) as job:
        job.wait_for(lambda: job.saved())
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.codes() == [75], job.outputs
    checkpoints, stopped = job.run_dir / "checkpoints", max(job.saved())
    small_disk(checkpoints)
    with Job(folder, *LONG) as job:
        job.wait_for(lambda: max(job.saved(), default=0) > stopped)
        fill(checkpoints / "filler")
        full_at = job.num_steps()
        job.wait_for(lambda: job.num_steps() >= full_at + 150)
        kept = job.saved()
        assert kept
        assert max(kept) <= full_at + 50  # a save that had its room before
        (checkpoints / "filler").unlink()
        job.wait_for(lambda: max(job.saved()) > full_at + 150)
        assert job.codes() == [0], job.outputs
    assert "cannot be saved: process 0: RESOURCE_EXHAUSTED" in job.outputs[0][1]
    assert "What was saved before is still there" in job.outputs[0][1]
    assert_same_run(job, golden(*LONG))
