"""A process that hangs or fails ends its job, and everybody says which it was."""

import signal
import time

import pytest

from faults.jobs import Job
from jddp.errors import ExitCode

pytestmark = [pytest.mark.processes, pytest.mark.slow]

HANG, ANOTHER_FAILED = ExitCode.HANG, ExitCode.ANOTHER_FAILED
ABORTED = -signal.SIGABRT
SOON = ["watchdog.step_seconds=3"]
# Promised are five seconds; twice that on a machine that is busy.
SECONDS = 10


def disturbed(folder, what, *arguments, num_processes=2):
    """Starts a job, does something to it once it runs, and waits for its end."""
    with Job(folder, *arguments, num_processes=num_processes) as job:
        job.wait_for(lambda: job.num_steps() >= 20)
        if callable(what):
            what(job)
        else:
            (folder / what).touch()
        since = time.monotonic()
        codes = job.codes()
    return job, codes, time.monotonic() - since


def said(job, process):
    return " ".join(job.outputs[process][1].split())


def test_a_run_of_one_process_that_hangs_ends_with_its_stacks(folder):
    job, codes, _ = disturbed(folder, "hang-0", *SOON, num_processes=1)
    assert codes == [HANG], job.outputs
    assert "jddp: no progress: process 0 on " in said(job, 0)
    assert " is in phase step after step " in said(job, 0)
    assert "the limit is 3 s" in said(job, 0)
    assert "take" in (job.run_dir / "logs" / "process_0.stacks").read_text()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_process_that_was_paused_is_not_ended_by_the_watchdog(folder, num_processes):
    # Twenty seconds, in which a step ends on a machine that is busy too.
    with Job(folder, "watchdog.step_seconds=20", num_processes=num_processes) as job:
        job.wait_for(lambda: job.num_steps() >= 20)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in job.processes:
                process.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(55)  # longer than the limit, and the half minute of one that is silent
        assert job.codes() == [0] * num_processes, job.outputs


def test_a_run_of_one_process_that_holds_the_interpreter_s_lock_ends_with_its_stacks(folder):
    job, codes, _ = disturbed(folder, "hold-0", *SOON, num_processes=1)
    assert codes == [-signal.SIGQUIT], job.outputs
    assert "take" in (job.run_dir / "logs" / "process_0.stacks").read_text()


@pytest.mark.parametrize("process", [0, 1])
def test_the_process_that_hangs_is_named_by_all(folder, process):
    job, codes, _ = disturbed(folder, f"hang-{process}", *SOON)
    assert codes == [HANG, HANG], job.outputs
    for one in (0, 1):
        assert f"no progress: process {process} on " in said(job, one)
    stacks = [(job.run_dir / "logs" / f"process_{i}.stacks").read_text() for i in (0, 1)]
    assert "take" in stacks[process]
    assert all("Thread" in text for text in stacks)


def test_a_process_that_is_stopped_is_the_one_that_does_not_answer(folder):
    with Job(folder, *SOON, num_processes=2) as job:
        job.wait_for(lambda: job.num_steps() >= 20)
        job.processes[1].send_signal(signal.SIGSTOP)
        job.processes[0].wait(timeout=60)
        job.processes[1].kill()
        codes = job.codes()
    assert codes[0] == HANG, job.outputs
    assert "process 1 does not answer" in said(job, 0)


def test_a_process_that_holds_the_interpreter_s_lock_does_not_answer(folder):
    with Job(folder, *SOON, num_processes=2) as job:
        job.wait_for(lambda: job.num_steps() >= 20)
        (folder / "hold-1").touch()
        job.processes[0].wait(timeout=60)
        job.processes[1].kill()  # or it ends as its peer's service does
        codes = job.codes()
    assert codes[0] == HANG, job.outputs
    assert "process 1 does not answer" in said(job, 0)


@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_fails_ends_the_job_with_its_own_words(folder, process):
    job, codes, seconds = disturbed(folder, f"fail-{process}")
    assert codes[process] == 1, job.outputs
    assert codes[1 - process] == ANOTHER_FAILED, job.outputs
    assert seconds < SECONDS
    assert "RuntimeError: a bug in reading" in job.outputs[process][1]
    other = said(job, 1 - process)
    assert f"process {process} on " in other
    assert "failed first, with exit code 1: RuntimeError: a bug in reading" in other


def test_a_process_that_fails_while_it_saves_ends_the_job_as_soon(folder):
    job, codes, seconds = disturbed(folder, "fail-1", "checkpoint.every_steps=1")
    assert codes == [ANOTHER_FAILED, 1], job.outputs
    assert seconds < SECONDS
    assert "RuntimeError: a bug in reading" in said(job, 0)


@pytest.mark.parametrize("every", [400, 100_000], ids=["on the way", "at the end"])
def test_an_evaluation_that_fails_on_all_processes_costs_no_step(folder, every):
    options = ["train.num_steps=1200", f"train.eval_every_steps={every}", "mesh.num_devices=2"]
    job, codes, _ = disturbed(folder, "fail-test", *options, "checkpoint.every_steps=100000")
    assert 1 in codes, job.outputs
    assert set(codes) <= {1, ANOTHER_FAILED}, job.outputs
    assert "RuntimeError: a bug in evaluation" in said(job, codes.index(1))
    [step] = [int(path.name) for path in (job.run_dir / "checkpoints").iterdir()]
    assert step == 1200 if every == 100_000 else step % every == 0


def test_a_process_whose_peer_is_killed_leaves_soon(folder):
    job, codes, seconds = disturbed(folder, lambda job: job.processes[1].kill())
    assert codes == [ANOTHER_FAILED, -signal.SIGKILL], job.outputs
    assert seconds < SECONDS
    assert "another process has ended without a report" in said(job, 0)


def test_a_process_whose_coordinator_is_killed_leaves_soon(folder):
    job, codes, seconds = disturbed(folder, lambda job: job.processes[0].kill())
    assert codes[1] in (ANOTHER_FAILED, ABORTED), job.outputs  # JAX aborts where it is first
    assert seconds < SECONDS
