"""A signal to any process: all stop after the same step, save, and resume bitwise identically."""

import os
import signal
import time

import pytest

from faults.jobs import Job, assert_same_run
from jddp.distributed.signals import SAME_SECONDS
from jddp.errors import ExitCode

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PREEMPTED = ExitCode.PREEMPTED


def stopped_step(job):
    """The step at which all stopped, which is the last that was saved."""
    said = job.outputs[0][0]
    assert f": saved step {job.saved()[-1]} of " in " ".join(said.split()), said
    return job.saved()[-1]


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
    ids=lambda x: x.name,
)
def test_a_run_of_one_process_stops_and_resumes_bitwise_identically(folder, golden, number):
    with Job(folder) as job:
        job.wait_for(lambda: job.num_steps() >= 20)
        job.processes[0].send_signal(number)
        assert job.codes() == [PREEMPTED], job.outputs
    assert 20 <= stopped_step(job) < 2000
    (complaint,) = job.outputs[0][1].splitlines()
    assert complaint.startswith(f"jddp: {number.name}: stopping after the step under way")
    with Job(folder) as job:
        assert job.codes() == [0], job.outputs
    assert_same_run(job, golden())


@pytest.mark.parametrize("who", [[0], [1], [0, 1]], ids=["first", "second", "both"])
def test_a_signal_to_any_process_stops_all_after_the_same_step(folder, golden, who):
    with Job(folder, num_processes=2) as job:
        job.wait_for(lambda: job.num_steps() >= 20)
        for process in who:
            job.processes[process].send_signal(signal.SIGTERM)
        assert job.codes() == [PREEMPTED] * 2, job.outputs
    assert stopped_step(job) < 2000
    with Job(folder, num_processes=2) as job:
        assert job.codes() == [0, 0], job.outputs
    assert_same_run(job, golden(num_processes=2))


def test_a_signal_while_compiling_stops_after_the_first_step(folder):
    with Job(folder) as job:
        job.wait_for((job.run_dir / "checkpoints").exists)
        job.processes[0].send_signal(signal.SIGTERM)
        (code,) = job.codes()
    assert code == PREEMPTED, job.outputs
    assert job.saved() in ([], [0], [1])


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_signal_before_the_first_step_ends_all_in_good_order(folder, num_processes):
    for process in range(num_processes):
        (folder / f"hang-{process}").touch()  # while the data are looked at
    with Job(folder, num_processes=num_processes) as job:
        job.wait_for(lambda: all((folder / f"hangs-{i}").exists() for i in range(num_processes)))
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.codes() == [PREEMPTED] * num_processes, job.outputs
    told = "jddp: SIGTERM: stopped before the first step. The same command resumes.\n"
    assert told in job.outputs[0][1]


def test_a_run_started_with_nohup_does_not_hear_a_closed_terminal(folder):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which a process is started with
    try:
        job = Job(folder)
    finally:
        signal.signal(signal.SIGHUP, before)
    with job:
        job.wait_for(lambda: job.num_steps() >= 20)
        job.processes[0].send_signal(signal.SIGHUP)
        assert job.codes() == [0], job.outputs


def said(job, text):
    return any(text in err for _, err in job._outputs())


def stands_still(job):
    """Whether no step ends in a second: the batches that were read ahead are used up."""
    before = job.num_steps()
    time.sleep(1)
    return job.num_steps() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda x: x.name)
def test_a_second_signal_ends_a_process_at_once(folder, number):
    with Job(folder) as job:
        job.wait_for(lambda: job.num_steps() >= 20)
        (folder / "hang-0").touch()  # so that it cannot stop in good order
        job.wait_for(lambda: (folder / "hangs-0").exists() and stands_still(job))
        job.processes[0].send_signal(number)
        job.wait_for(lambda: said(job, "stopping after the step under way"))
        job.processes[0].send_signal(number)  # at once, which is the first once more
        time.sleep(SAME_SECONDS)
        assert job.processes[0].poll() is None
        job.processes[0].send_signal(number)
        since = time.monotonic()
        assert job.codes() == [128 + number], job.outputs
        assert time.monotonic() - since < 5
    assert said(job, f"{number.name} again: leaving at once")


def test_a_signal_to_a_process_and_to_its_group_is_one(folder, golden):
    with Job(folder, start_new_session=True) as job:
        job.wait_for(lambda: job.num_steps() >= 20)
        job.processes[0].send_signal(signal.SIGTERM)  # as GNU timeout does
        os.killpg(job.processes[0].pid, signal.SIGTERM)
        assert job.codes() == [PREEMPTED], job.outputs
    with Job(folder) as job:
        assert job.codes() == [0], job.outputs
    assert_same_run(job, golden())


def test_ctrl_c_in_a_terminal_reaches_processes_that_read_data_too(folder, golden):
    with Job(folder, "data.num_workers=2", start_new_session=True) as job:
        job.wait_for(lambda: job.num_steps() >= 20)
        os.killpg(job.processes[0].pid, signal.SIGINT)
        assert job.codes() == [PREEMPTED], job.outputs
    assert "Traceback" not in job.outputs[0][1]
    with Job(folder, "data.num_workers=2") as job:
        assert job.codes() == [0], job.outputs
    assert_same_run(job, golden())
