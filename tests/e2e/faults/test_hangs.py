"""A process that hangs, fails or reads NaN ends its job, and everybody says which it was."""

import json
import signal
import socket
import time

import pytest
from sweeps import swept

from faults.jobs import Job
from jddp.ground.errors import ExitCode

pytestmark = [pytest.mark.processes, pytest.mark.slow]

HANG, ANOTHER_FAILED = ExitCode.HANG, ExitCode.ANOTHER_FAILED
ABORTED = -signal.SIGABRT
SOON = "watchdog.step_seconds=3"
# Promised are five seconds; twice that on a machine that is busy.
SECONDS = 10


def disturbed(folder, what, *arguments, num_processes=2):
    """Starts a job, does something to it once it runs, and waits for its end."""
    with Job(folder, *arguments, num_processes=num_processes) as job:
        job.wait_for_step(20)
        if callable(what):
            what(job)
        else:
            (folder / what).touch()
        since = time.monotonic()
        codes = job.codes()
    return job, codes, time.monotonic() - since


def kept(job):
    """The first failure, which process 0 keeps in the run directory."""
    return json.loads((job.run_dir / "logs" / "failure.json").read_text())


def stacks(job, process):
    return (job.run_dir / "logs" / f"process_{process}.stacks").read_text()


@pytest.mark.parametrize(
    "what, code", swept([("hang-0", HANG), ("hold-0", -signal.SIGQUIT)], every=2)
)
def test_a_run_of_one_process_that_hangs_or_holds_the_lock_ends_with_stacks(folder, what, code):
    job, codes, _ = disturbed(folder, what, SOON, num_processes=1)
    assert codes == [code], job.outputs
    reported = ("jddp: no progress: process 0 on ", " is in phase step after step ", "is 3 s")
    assert code != HANG or all(words in job.said() for words in reported)
    assert "take" in stacks(job, 0)


@pytest.mark.long  # It waits for a minute.
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_process_that_was_paused_is_not_ended_by_the_watchdog(folder, num_processes):
    # Twenty seconds, in which a step ends on a machine that is busy too.
    with Job(folder, "watchdog.step_seconds=20", num_processes=num_processes) as job:
        job.wait_for_step(20)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in job.processes:
                process.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(55)  # longer than the limit, and the half minute of one that is silent
        assert job.codes() == [0] * num_processes, job.outputs


@pytest.mark.parametrize("process", swept([0, 1], every=2))
def test_the_process_that_hangs_is_named_by_all(folder, process):
    job, codes, _ = disturbed(folder, f"hang-{process}", SOON)
    assert codes == [HANG, HANG], job.outputs
    for one in (0, 1):
        assert f"no progress: process {process} on " in job.said(one)
        assert "Thread" in stacks(job, one)
    assert "take" in stacks(job, process)
    failure = kept(job)
    assert (failure["process"], failure["exit_code"], failure["phase"]) == (process, HANG, "step")
    assert failure["step"] >= 20
    assert failure["exception"] is None


@pytest.mark.parametrize("how", swept(["stopped", "holds_the_lock"], every=2))
def test_a_process_that_is_stopped_or_holds_the_interpreter_s_lock_does_not_answer(folder, how):
    def disturb(job):
        if how == "stopped":
            job.processes[1].send_signal(signal.SIGSTOP)
        else:
            (folder / "hold-1").touch()
        job.processes[0].wait(timeout=60)
        job.processes[1].kill()  # or it ends as its peer's service does

    job, codes, _ = disturbed(folder, disturb, SOON)
    assert codes[0] == HANG, job.outputs
    assert "process 1 does not answer" in job.said()
    failure = kept(job)
    # Its host it has reported when it joined.
    assert (failure["process"], failure["host"], failure["step"]) == (1, socket.gethostname(), None)


@pytest.mark.parametrize(
    "process, saves", swept([(0, []), (1, ["checkpoint.every_steps=1"])], every=2)
)
def test_a_process_that_fails_also_in_saving_ends_the_job_with_its_words(folder, process, saves):
    job, codes, seconds = disturbed(folder, f"fail-{process}", *saves)
    assert codes[process] == 1, job.outputs
    assert codes[1 - process] == ANOTHER_FAILED, job.outputs
    assert seconds < SECONDS
    assert "RuntimeError: a bug in reading" in job.outputs[process][1]
    failure = kept(job)
    assert (failure["process"], failure["exit_code"], failure["phase"]) == (process, 1, "step")
    assert failure["exception"] == {"type": "RuntimeError", "message": "a bug in reading"}
    assert f"process {process} on " in job.said(1 - process)
    assert "failed first, with exit code 1: RuntimeError: a bug in reading" in job.said(1 - process)


@pytest.mark.parametrize("every", [200, pytest.param(1000, marks=pytest.mark.long)])
def test_an_evaluation_that_fails_on_all_processes_costs_no_step(folder, every):
    options = ["train.num_steps=400", f"train.eval_every_steps={every}"]
    job, codes, _ = disturbed(folder, "fail-test", *options, "checkpoint.every_steps=1000")
    assert 1 in codes, job.outputs
    assert set(codes) <= {1, ANOTHER_FAILED}, job.outputs
    assert "RuntimeError: a bug in evaluation" in job.said(codes.index(1))
    (step,) = job.saved()
    assert step == 400 if every == 1000 else step % every == 0


@pytest.mark.parametrize("killed", [1, 0])
def test_a_process_whose_peer_or_coordinator_is_killed_leaves_soon(folder, killed):
    job, codes, seconds = disturbed(folder, lambda job: job.processes[killed].kill())
    assert seconds < SECONDS
    assert codes[killed] == -signal.SIGKILL, job.outputs
    assert codes[1 - killed] in (ANOTHER_FAILED, *[ABORTED] * (killed == 0))  # by JAX, if first
    if killed == 1:
        assert "has lost another process, which ended without a report: " in job.said()
        assert not (job.run_dir / "logs" / "failure.json").exists()  # nobody knows the first


def test_a_nan_in_the_rows_of_one_process_is_found_by_all(folder):
    options = ("ddp.skip_nonfinite=true", "train.max_consecutive_skips=4")
    with Job(folder, *options, num_processes=2) as job:
        job.wait_for_step(20)
        (folder / "nan-1").touch()
        # On a busy machine the end of one may reach the other before it ends by itself.
        assert sorted(job.codes()) in ([80, 80], [80, 81]), job.outputs
    (evidence,) = (job.run_dir / "nonfinite").iterdir()
    report = json.loads((evidence / "report.json").read_text())
    assert (report["skipped_in_a_row"], report["metrics"]["skipped"]) == (4, 4)
    assert report["inputs_not_finite"] == [report["examples"][4]]  # the first of its four rows
    for _, said in job.outputs:
        assert f"The loss is nan at step {report['step']}, the last of 4 in a row" in said
    assert not job.saved()
