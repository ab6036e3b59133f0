"""A run directory has one writer at a time. (That a killed job leaves no lock: test_kills.py.)"""

import signal

import pytest

from faults.jobs import Job, assert_same_run

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_a_second_job_in_the_same_directory_is_refused_and_disturbs_nothing(folder, golden):
    with Job(folder) as job:
        job.wait_for_step(20)
        job.processes[0].send_signal(signal.SIGSTOP)  # or it might be over before the other looks
        with Job(folder) as second:
            assert second.codes() == [2], second.outputs
        assert f"is in use by process {job.processes[0].pid} on " in second.said()
        assert "Wait for its end, or choose another run.dir" in second.said()
        job.processes[0].send_signal(signal.SIGCONT)
        assert job.codes() == [0], job.outputs
    assert_same_run(job, golden())
