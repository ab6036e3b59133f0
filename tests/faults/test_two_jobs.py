"""A run directory has one writer at a time."""

import signal

import pytest

from faults.jobs import Job, assert_same_run

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_a_second_job_in_the_same_directory_is_refused_and_disturbs_nothing(folder, golden):
    with Job(folder) as job:
        job.wait_for(lambda: job.num_steps() >= 20)
        job.processes[0].send_signal(signal.SIGSTOP)  # or it might be over before the other looks
        with Job(folder) as second:
            assert second.codes() == [2], second.outputs
        (_, said), pid = second.outputs[0], job.processes[0].pid
        assert f"is in use by process {pid} on " in said
        assert "Wait for its end, or choose another run.dir" in said
        job.processes[0].send_signal(signal.SIGCONT)
        assert job.codes() == [0], job.outputs
    assert_same_run(job, golden())


def test_the_lock_of_a_job_that_was_killed_is_gone_with_it(folder, golden):
    with Job(folder) as job:
        job.wait_for(lambda: job.saved())
        job.processes[0].kill()
        job.codes()
    with Job(folder) as job:
        assert job.codes() == [0], job.outputs
    assert_same_run(job, golden())
