"""A link that goes down ends both sides of a job, without a launcher that would end them."""

import signal
import time

import pytest
from faults.jobs import Job, train_command, variables_of

from clusters.hosts import Hosts
from jddp.distributed.identity import VARIABLES

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.xdist_group("hosts")]
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


def test_processes_that_hear_nothing_of_each_other_end(folder, tmp_path):
    with Hosts(tmp_path, "h0", "h1") as hosts, OnHosts(hosts, folder) as job:
        job.wait_for(job.saved)
        hosts.set_link("h1", "down")
        down = time.monotonic()
        assert job.codes() == [-signal.SIGABRT] * 2, job.outputs
        # JAX allows for more than it promises; a hundred seconds are what it waits if nobody asks.
        assert time.monotonic() - down < 60
        assert hosts.pids("h0") == hosts.pids("h1") == []
    assert "unhealthy (stopped sending heartbeats)" in job.said(0)
    assert "CoordinationService/Heartbeat" in job.said(1)
