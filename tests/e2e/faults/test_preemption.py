"""A signal to any process: all stop after the same step, save, and resume bitwise identically."""

import os
import signal
import time

import pytest
from sweeps import swept

from faults.jobs import Job, assert_ends, assert_same_run
from jddp.distributed.signals import SAME_SECONDS
from jddp.ground.errors import ExitCode

pytestmark = [pytest.mark.processes, pytest.mark.slow]
PREEMPTED, LONG = ExitCode.PREEMPTED, pytest.mark.long


def stop(job, *kills, step=20):
    """Ends a job that trains by these signals; returns the step at which all stopped."""
    job.wait_for_step(step)
    for kill, process, number in kills:
        kill(job.processes[process].pid, number)
    assert job.codes() == [PREEMPTED] * len(job.processes), job.outputs
    out = " ".join(job.outputs[0][0].split())
    assert f": saved step {job.last_saved()} of 1000" in out, out
    return job.last_saved()


def test_a_run_stopped_in_every_way_ends_bitwise_identically(folder, golden):
    step, kill, group = 0, (os.kill, 0), (os.killpg, 0)
    for name, data, *kills in (
        ("SIGTERM", [], (*kill, signal.SIGTERM), (*group, signal.SIGTERM)),  # GNU timeout's
        ("SIGINT", ["data.num_workers=2"], (*group, signal.SIGINT)),  # a terminal's
        ("SIGHUP", [], (*kill, signal.SIGHUP)),
    ):
        with Job(folder, *data, start_new_session=True) as job:
            step = stop(job, *kills, step=step + 20)
        (complaint,) = job.outputs[0][1].splitlines()
        assert complaint.startswith(f"jddp: {name}: finishing this step, then stopping")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts a process
    try:
        job = Job(folder)
    finally:
        signal.signal(signal.SIGHUP, before)
    with job:
        job.wait_for_step(step + 20)
        job.processes[0].send_signal(signal.SIGHUP)
        assert job.codes() == [0], job.outputs
    assert_same_run(job, golden())


@pytest.mark.parametrize(
    "who", [pytest.param([0], marks=LONG), [1], pytest.param([0, 1], marks=LONG)]
)
def test_a_signal_to_any_process_stops_all_after_the_same_step(folder, golden, who):
    with Job(folder, num_processes=2) as job:
        stop(job, *((os.kill, process, signal.SIGTERM) for process in who))
    job = assert_ends(folder, num_processes=2)
    assert_same_run(job, golden(num_processes=2))


@pytest.mark.parametrize("num_processes", swept([1, 2], every=2))
def test_a_signal_before_the_first_step_ends_all_in_good_order(folder, num_processes):
    for process in range(num_processes):
        (folder / f"hang-{process}").touch()  # while the data are looked at
    with Job(folder, num_processes=num_processes) as job:
        job.wait_for(lambda: all((folder / f"hangs-{i}").exists() for i in range(num_processes)))
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.codes() == [PREEMPTED] * num_processes, job.outputs
    text = "jddp: SIGTERM: stopped before the first step. The same command resumes.\n"
    assert text in job.outputs[0][1]


def stands_still(job):
    """Whether no step ends in a second: the batches that were read ahead are used up."""
    before = job.num_steps()
    time.sleep(1)
    return job.num_steps() == before


def test_a_second_signal_ends_a_process_at_once(folder):
    with Job(folder) as job:
        job.wait_for_step(20)
        (folder / "hang-0").touch()  # so that it cannot stop in good order
        job.wait_for(lambda: (folder / "hangs-0").exists() and stands_still(job))
        job.processes[0].send_signal(signal.SIGTERM)
        job.wait_for(lambda: "finishing this step, then stopping" in job.said())
        job.processes[0].send_signal(signal.SIGTERM)  # at once, which is the first once more
        time.sleep(SAME_SECONDS)
        assert job.processes[0].poll() is None
        job.processes[0].send_signal(signal.SIGINT)
        since = time.monotonic()
        assert job.codes() == [128 + signal.SIGINT], job.outputs
        assert time.monotonic() - since < 5
    assert "SIGINT again: exiting now" in job.said()
