"""A process of a job, and its spare, which forks the next one and is never left behind."""

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import environment, read_proc, wait_until

from jddp.distributed.worker import Worker

PROGRAM = """
import os, sys, time
from jddp.distributed.worker import fork_spare

forked = {fork}
print(os.environ["WORD"], forked, os.getsid(0) == os.getpid(), flush=True)
print("about", os.environ["WORD"], file=sys.stderr, end=os.environ.get("END"))
time.sleep(float(os.environ.get("SECONDS", 0)))
sys.exit(3)
"""
FORKING, PLAIN = (PROGRAM.format(fork=fork) for fork in ("fork_spare()", "False"))


def worker_in(folder, program=FORKING, may_fork=True):
    return closing(Worker(0, ["-c", program], Path(folder, "log"), may_fork=may_fork))


def spare_of(worker):
    """The process that an attempt has forked at its start, which must live."""
    children = f"task/{worker.pid}/children"
    wait_until(lambda: read_proc(worker.pid, children))
    return int(read_proc(worker.pid, children).split()[0])


def end_of(worker):
    wait_until(lambda: worker.poll() is not None)
    return worker.poll()


def attempt(worker, **variables):
    """Runs the program once, to its end; returns its number, and what it has printed by now."""
    worker.begin(environment(**variables))
    assert end_of(worker) == worker.returncode == 3
    worker.read_out()
    return worker.pid, worker.log.read_text().splitlines()


def test_a_spare_forks_each_later_attempt_with_its_variables_and_output(tmp_path):
    with worker_in(tmp_path) as worker:
        pids = {attempt(worker, WORD="one")[0], attempt(worker, WORD="two", ANOTHER="1")[0]}
        pid, lines = attempt(worker, WORD="one", END=".")  # and no end of the line
    assert len({*pids, pid}) == 3
    want = ["one False True", "two True True", "one True True"]
    assert [x for x in lines if "about" not in x] == want
    assert worker.stderr_end() == "about one."  # of its own attempt


def test_a_forked_process_is_signalled_and_killed_as_one_that_was_started(tmp_path):
    with worker_in(tmp_path) as worker:
        attempt(worker, WORD="one")
        for kill in (os.kill, os.killpg):
            worker.begin(environment(WORD="two", SECONDS="60"))
            assert read_proc(worker.pid, "comm") == "jddp-worker\n"
            kill(worker.pid, signal.SIGKILL)
            assert end_of(worker) == -signal.SIGKILL


@pytest.mark.parametrize("why", ["killed", "not known to the program", "not asked for"])
def test_without_a_spare_a_program_is_started_again(tmp_path, why):
    program = PLAIN if why == "not known to the program" else FORKING
    with worker_in(tmp_path, program, may_fork=why != "not asked for") as worker:
        worker.begin(environment(WORD="one", SECONDS="1"))
        if why == "killed":
            os.kill(spare_of(worker), signal.SIGKILL)
        assert end_of(worker) == 3
        assert attempt(worker, WORD="two")[1][-2:] == ["two False True", "about two"]


def test_a_program_that_has_inherited_the_variable_forks_no_spare():
    inherited = environment(WORD="one", JDDP_SPARE=f"1 {os.getppid()}")
    done = subprocess.run([sys.executable, "-c", FORKING], env=inherited, capture_output=True)
    assert (done.stdout, done.returncode) == (b"one False False\n", 3)


@pytest.mark.parametrize("how", ["in order", "killed"])
def test_a_spare_ends_with_its_launcher(tmp_path, how):
    program = f"""
import os, signal, sys
from pathlib import Path
from jddp.distributed.worker import Worker
worker = Worker(0, ["-c", {FORKING!r}], Path("log"), may_fork=True)
worker.begin({environment(WORD="one", SECONDS="60")!r})
print(worker.pid, flush=True)
sys.stdin.readline()
os.kill(worker.pid, signal.SIGKILL)
worker.close()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": tmp_path}
    with subprocess.Popen([sys.executable, "-c", program], env=environment(), **pipes) as launcher:
        worker = SimpleNamespace(pid=int(launcher.stdout.readline()))
        spare = spare_of(worker)
        wait_until(lambda: read_proc(spare, "comm") == "jddp-spare\n")
        if how == "killed":
            launcher.kill()
            os.kill(worker.pid, signal.SIGKILL)  # as the program that watches the launcher does
    wait_until(lambda: not read_proc(spare, "cmdline"), seconds=60)
