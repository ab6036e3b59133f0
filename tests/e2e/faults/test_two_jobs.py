"""A run directory has one writer at a time, and all processes of its job see it."""

import signal

import pytest

from faults.jobs import Job, assert_same_run, make_folder

pytestmark = [pytest.mark.processes, pytest.mark.slow]


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


IMPATIENT = """
from jddp.checkpoint import checkpoints
from mine import points

checkpoints.SEEN_SECONDS = 2.0  # and not a minute, in which a shared file system may be late
"""


def test_a_directory_that_not_all_processes_of_a_job_see_is_named_before_training(folder, tmp_path):
    other = make_folder(tmp_path / "other", folder / "no-cache")
    for each in (folder, other):
        (each / "impatient.py").write_text(IMPATIENT)
    arguments = ["data.target=impatient:points", "run.dir=here"]
    with Job(folder, *arguments, num_processes=2, last_folder=other) as job:
        assert job.codes() == [81, 74], job.outputs
    assert not job.num_steps()
    assert not job.saved()
    what = f"Process 1 does not see {other}/here/lock, which process 0 has written."
    assert f"jddp: {what}" in job.said(1)
    assert f"failed first, with exit code 74: FileSystemError: {what}" in job.said()
