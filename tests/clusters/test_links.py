"""A link that goes down ends both sides of a job, without a launcher that would end them."""

import signal
import sys
import time

import pytest
from faults.jobs import make_folder
from runs import environment

from clusters.hosts import Hosts
from jddp.distributed.identity import VARIABLES

pytestmark = [pytest.mark.processes, pytest.mark.slow]
SECONDS = 120  # for what takes ten
ENDLESS = ["train.num_steps=100000000", "checkpoint.every_steps=20"]


@pytest.fixture
def folder(tmp_path, request):
    return make_folder(tmp_path / "user", request.config.cache.mkdir("jobs"))


def start(hosts, folder, *, process, **variables):
    """One of two processes, each on a host of its own; what it says is in `said-PROCESS`."""
    told = {"XDG_CACHE_HOME": (folder / "cache").read_text(), "JAX_NUM_CPU_DEVICES": "1"}
    job = dict(zip(VARIABLES, ("h0:1234", "2", str(process)), strict=True))
    train = [sys.executable, "-m", "jddp.train", "--config", "job.yaml", *ENDLESS]
    with (folder / f"said-{process}").open("w") as said:
        command = ["env", f"--chdir={folder}", *train]
        told = environment(**told, **job, **variables)
        return hosts.start(f"h{process}", *command, env=told, stdout=said, stderr=said)


def wait_for(condition, folder):
    until = time.monotonic() + SECONDS
    while not condition():
        said = [(folder / f"said-{i}").read_text() for i in range(2)]
        assert time.monotonic() < until, said
        time.sleep(0.05)


def test_processes_that_hear_nothing_of_each_other_end(folder, tmp_path):
    with Hosts(tmp_path, "h0", "h1") as hosts:
        told = {"JDDP_HEARTBEAT_SECONDS": "10"}
        processes = [start(hosts, folder, process=i, **told) for i in range(2)]
        wait_for(lambda: list((folder / "runs").glob("*/checkpoints/20")), folder)
        assert [process.poll() for process in processes] == [None, None]
        hosts.set_link("h1", "down")
        down = time.monotonic()
        wait_for(lambda: None not in [process.poll() for process in processes], folder)
        # JAX allows for more than it promises; a hundred seconds are what it waits if nobody asks.
        assert time.monotonic() - down < 60
        assert [process.wait() for process in processes] == [-signal.SIGABRT] * 2
        assert hosts.pids("h0") == hosts.pids("h1") == []
    first, second = ((folder / f"said-{i}").read_text() for i in range(2))
    assert "unhealthy (stopped sending heartbeats)" in first
    assert "CoordinationService/Heartbeat" in second
