"""A link that goes down ends both sides of a job, and machines end with the tests that use them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.jobs import Job, train_command, variables_of
from runs import ROOT, environment, wait_until

from clusters.hosts import Hosts, refuse_without
from clusters.launching import assert_empty
from jddp.distributed.identity import VARIABLES

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("hosts")]
ENDLESS = ["train.num_steps=100000000", "checkpoint.every_steps=20"]


class OnHosts(Job):
    """A job of two processes, each on a host of its own."""

    def __init__(self, hosts, folder):
        super().__init__(folder, num_processes=0)
        environ = {"JAX_NUM_CPU_DEVICES": "1", "JDDP_HEARTBEAT_SECONDS": "10"}
        for process in range(2):
            job = dict(zip(VARIABLES, ("h0:1234", "2", str(process)), strict=True))
            command = hosts.command(f"h{process}", *train_command("run", *ENDLESS))
            self._start(command, cwd=folder, env=variables_of(folder, **environ, **job))


@pytest.mark.slow
def test_processes_that_hear_nothing_of_each_other_end(folder, tmp_path):
    with Hosts(tmp_path, "h0", "h1") as hosts, OnHosts(hosts, folder) as job:
        job.wait_for(job.saved)
        hosts.set_link("h1", "down")
        down = time.monotonic()
        assert job.codes() == [-signal.SIGABRT] * 2, job.outputs
        # JAX allows for more than it promises; a hundred seconds are what it waits if nobody asks.
        assert time.monotonic() - down < 60
        assert_empty(hosts, "h0")
        assert_empty(hosts, "h1")
    assert "unhealthy (stopped sending heartbeats)" in job.said(0)
    assert "CoordinationService/Heartbeat" in job.said(1)


# As slurmd starts slurmstepd: in a session of its own, with nothing open that is the parent's.
USE = """
import subprocess
import sys
from pathlib import Path

from clusters.hosts import Hosts

with Hosts(Path(sys.argv[1]), "h1") as hosts:
    hosts.run("h1", "sh", "-c", "setsid sleep 1000 </dev/null >/dev/null 2>&1 &")
    print(*hosts.pids("h1"), flush=True)
    if sys.argv[2] == "killed":
        sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_what_runs_on_a_host_ends_with_the_tests(tmp_path, how):
    refuse_without("ip", "nsenter", "unshare")
    tests = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'e2e'}")
    command, pipes = [sys.executable, "-c", USE, str(tmp_path), how], {"stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=tests, stdin=subprocess.PIPE, text=True, **pipes) as user:
        (left,) = map(int, user.stdout.readline().split())
        if how == "killed":
            assert Path(f"/proc/{left}").exists()
            user.kill()
    wait_until(lambda: not Path(f"/proc/{left}").exists(), seconds=10)
