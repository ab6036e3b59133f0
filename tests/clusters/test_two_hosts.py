"""The same command on each of two hosts: late, badly named, cut off from each other, or alone."""

import contextlib
import re
import signal
import time

import pytest
from test_launch import FEW, assert_alike, result

from clusters.hosts import Hosts
from clusters.launching import LONGER, OnHost, assert_only, two_launchers, workers_of
from clusters.slow_link import slow_link
from jddp.errors import ExitCode

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.xdist_group("hosts")]
HEARTBEAT_SECONDS = 15
SILENCE = {"JDDP_HEARTBEAT_SECONDS": str(HEARTBEAT_SECONDS)}


@pytest.fixture
def hosts(tmp_path):
    with Hosts(tmp_path, "h1", "h2") as hosts:
        yield hosts
        for name in hosts.addresses:
            assert_only(hosts, name)


@contextlib.contextmanager
def ends_of(*nodes):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(node()) for node in nodes]


def test_hosts_of_which_one_is_late_and_far_away_train_as_one(hosts, jobs, one):
    first, second = two_launchers(hosts, jobs, "late", *FEW)
    with slow_link(hosts, "h2", delay_seconds=0.01, loss=0.01), first() as first:
        hosts.run("h1", "sh", "-c", "until ss -Hltn sport = :61500 | grep -q .; do sleep 0.1; done")
        with second() as second:
            assert (first.end(), second.end()) == (0, 0), (first.err, second.err)
    assert "job      4 processes, set by jddp.launch" in first.out
    assert_alike(result(jobs, "late")[0], one)


def test_the_default_job_on_two_hosts_of_four_devices_is_that_of_one_process_of_eight(hosts, jobs):
    few = ["-m", "jddp.train", "train.num_steps=4", "train.log_every_steps=1"]
    one = ["--devices-per-process", "8", "--logs", "logs-whole", *few, "run.dir=whole"]
    with OnHost(hosts, "h1", jobs, *one) as whole:
        assert whole.end() == 0, whole.err
    both = ["--devices-per-process", "4", "--num-nodes", "2", "--coordinator", "h1:61500"]

    def node(rank):
        mine = ["--node-rank", str(rank), "--logs", f"logs-halves-{rank}"]
        return OnHost(hosts, f"h{rank + 1}", jobs, *both, *mine, *few, "run.dir=halves")

    with node(0) as first, node(1) as second:
        assert (first.end(), second.end()) == (0, 0), (first.err, second.err)
    assert "2 processes x 4 cpu devices" in first.out
    assert_alike(result(jobs, "halves")[0], result(jobs, "whole")[0])


def test_a_link_that_is_cut_for_a_moment_changes_nothing(hosts, jobs, golden):
    with ends_of(*two_launchers(hosts, jobs, "moment", *LONGER)) as (first, second):
        first.wait_for("moment/checkpoints/60")
        hosts.set_link("h2", "down")
        time.sleep(2)  # which is the fault
        hosts.set_link("h2", "up")
        assert (first.end(), second.end()) == (0, 0), (first.err, second.err)
    assert result(jobs, "moment") == golden


def test_hosts_whose_names_lead_nowhere_or_to_themselves_train(tmp_path, jobs, one):
    # gloo connects from the larger address to the smaller: here always to the host that is asked.
    with Hosts(tmp_path, "h1", "h2", network="192.168.8") as hosts:
        hosts.resolve("h1", "127.0.1.1 h1", "192.168.8.2 h2")  # as Debian does
        hosts.resolve("h2", "192.168.8.1 h1")
        with ends_of(*two_launchers(hosts, jobs, "names", *FEW)) as (first, second):
            assert (first.end(), second.end()) == (0, 0), (first.err, second.err)
    assert_alike(result(jobs, "names")[0], one)


def test_a_host_that_never_comes_is_waited_for_in_vain(hosts, jobs):
    first, _ = two_launchers(hosts, jobs, "alone", JDDP_START_SECONDS="3")
    start = time.monotonic()
    with first() as first:
        assert first.end() == 69
    assert time.monotonic() - start < 30
    assert "within 3 s" in first.err


def test_a_host_that_does_not_find_the_other_says_so(hosts, jobs):
    _, second = two_launchers(
        hosts, jobs, "alone", address="10.8.0.9:61500", JDDP_START_SECONDS="1"
    )
    with second() as second:
        assert second.end() == 69
    assert "cannot reach process 0 at 10.8.0.9:61500: " in second.err.replace("node 0", "process 0")


def test_hosts_that_are_cut_off_for_good_end_by_themselves(hosts, jobs):
    with ends_of(*two_launchers(hosts, jobs, "cut", *LONGER, **SILENCE)) as (first, second):
        first.wait_for("cut/checkpoints/60")
        hosts.set_link("h2", "down")
        cut = time.monotonic()
        codes = first.end(), second.end()
        assert time.monotonic() - cut < HEARTBEAT_SECONDS + 60
    # Whoever notices first, JAX's processes or the launchers.
    assert set(codes) <= {ExitCode.ANOTHER_FAILED, 128 + signal.SIGABRT}, (first.err, second.err)
    lost = "node 1 was lost|JAX has lost process(es 2, 3| 2| 3), or the connection to it"
    assert re.search(lost, first.err), first.err
    lost = "node 0 was lost|JAX has lost process 0, or the connection to it"
    assert re.search(lost, second.err), second.err
    # Process 0 saves, and is on one side.
    assert result(jobs, "cut")[1] < 160


def test_hosts_that_were_cut_off_start_again_bitwise_identically(hosts, jobs, golden):
    options = ["--max-restarts", "1"]
    nodes = two_launchers(hosts, jobs, "rejoins", *LONGER, options=options, **SILENCE)
    with ends_of(*nodes) as (first, second):
        first.wait_for("rejoins/checkpoints/60")
        before = {name: workers_of(hosts, name).items() for name in hosts.addresses}
        hosts.set_link("h2", "down")
        until = time.monotonic() + HEARTBEAT_SECONDS + 60
        while any(workers_of(hosts, name).items() & before[name] for name in before):
            assert time.monotonic() < until
            time.sleep(0.1)
        hosts.set_link("h2", "up")
        assert (first.end(), second.end()) == (0, 0), (first.err, second.err)
    assert "resumed from step" in first.out
    assert result(jobs, "rejoins") == golden
