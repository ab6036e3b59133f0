"""A process that waits takes the place of one that has failed, and is never left behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
from runs import environment, wait_until

from jddp.distributed import spares
from jddp.distributed.failure_file import VARIABLE, read_failure
from jddp.distributed.group import Launch
from jddp.distributed.identity import JOB, VARIABLES
from jddp.distributed.spares import Spares

COMMAND = ("-m", "jddp.train", "run.dir=/dev/null/none")  # a mistake, which its failure file has


@pytest.fixture
def group(tmp_path):
    """A group of one process, for longer than a spare waits."""
    numbers = dict(zip(VARIABLES, ("127.0.0.1:1", "4", "3"), strict=True))
    environ = environment(JDDP_JOB="first", **numbers)
    worker = SimpleNamespace(number=3, environ=environ, log=tmp_path / "process_3.log")
    return SimpleNamespace(running=[worker], began=time.monotonic() - 60)


def waiting(group, command=COMMAND):
    """The spare of that process, and the object that has started it."""
    made = Spares(Launch(command))
    made.start(group)
    return made, made._waiting.get(3)


def test_a_spare_runs_the_program_with_the_variables_of_the_next_attempt(group, tmp_path):
    made, spare = waiting(group)
    changed = {JOB: "second", VARIABLES[0]: "127.0.0.1:2", VARIABLE: str(tmp_path / "failure.json")}
    worker = made.take(3, group.running[0].environ | changed)
    assert worker is spare
    assert worker.wait(60) != 0
    worker.read_out()
    failure = read_failure(tmp_path / "failure.json")
    assert (failure["process"], failure["exit_code"]) == (3, worker.returncode)
    assert "/dev/null" in (tmp_path / "process_3.log").read_text()
    assert made.take(3, group.running[0].environ) is None  # it is taken


def test_a_spare_that_has_died_or_has_another_environment_is_not_taken(group):
    environ = group.running[0].environ
    made, spare = waiting(group)
    spare.kill()
    spare.wait()  # its input stays open until `take`
    assert made.take(3, environ) is None
    made, spare = waiting(group)
    assert made.take(3, environ | {"JAX_PLATFORMS": "another"}) is None
    assert spare.returncode == -signal.SIGKILL


def test_spares_end_with_their_launcher(group):
    made, spare = waiting(group)
    made.close()
    assert spare.returncode == -signal.SIGKILL


def test_spares_end_when_their_launcher_is_killed(tmp_path):
    program = f"""
import time
from pathlib import Path
from types import SimpleNamespace
from jddp.distributed.group import Launch
from jddp.distributed.spares import Spares
import os
worker = SimpleNamespace(number=0, environ=dict(os.environ), log=Path({str(tmp_path / "log")!r}))
made = Spares(Launch({COMMAND!r}))
made.start(SimpleNamespace(running=[worker], began=time.monotonic() - 60))
print(made._waiting[0].pid, flush=True)
time.sleep(60)
"""
    pipes = {"stdout": subprocess.PIPE, "text": True, "env": environment()}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as launcher:
        spare = int(launcher.stdout.readline())
        os.kill(spare, 0)  # it lives
        launcher.kill()

    def has_ended():
        try:
            os.kill(spare, 0)
        except ProcessLookupError:
            return True
        return False

    wait_until(has_ended, seconds=60)


@pytest.mark.parametrize("reason", ["a script", "no memory", "early"])
def test_no_spare_is_started_where_it_could_not_help(group, tmp_path, monkeypatch, reason):
    if reason == "no memory":
        memory = tmp_path / "meminfo"
        memory.write_text("MemTotal: 9999999 kB\nMemAvailable: 1000 kB\n")
        monkeypatch.setattr(spares, "_MEMORY", memory)
    elif reason == "early":
        group.began = time.monotonic()
    made, spare = waiting(group, ("train.py",) if reason == "a script" else COMMAND)
    with closing(made):
        assert spare is None
