"""The same command on each of two hosts: late, badly named, cut off, killed, stopped, or alone."""

import contextlib
import os
import re
import shutil
import signal
import time

import pytest
from faults.jobs import FEW, assert_alike, result, train_command
from runs import wait_until

from clusters.hosts import Hosts
from clusters.launching import LONGER, OnHost, assert_empty, two_launchers, workers_of
from jddp.distributed.identity import VARIABLES
from jddp.ground.errors import ExitCode

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.xdist_group("hosts")]
HEARTBEAT_SECONDS = 10
SILENCE = {"JDDP_HEARTBEAT_SECONDS": str(HEARTBEAT_SECONDS)}


@pytest.fixture(scope="module")
def undisturbed(golden):
    """The result of four processes on one host, which nothing has disturbed."""
    return result(golden(*LONGER, "mesh.num_devices=4", num_processes=4).run_dir, ".")


@pytest.fixture
def hosts(tmp_path):
    with Hosts(tmp_path, "h1", "h2") as hosts:
        yield hosts
        for name in hosts.addresses:
            assert_empty(hosts, name)


@contextlib.contextmanager
def ends_of(*nodes, codes=(0, 0)):
    """Starts launchers, and waits after the block for their ends."""
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(node()) for node in nodes]
        yield started
        assert tuple(node.end() for node in started) == codes, [node.err for node in started]


def workers(hosts):
    return {(name, *x) for name in hosts.addresses for x in workers_of(hosts, name).items()}


def test_hosts_of_which_one_is_late_and_badly_named_train_as_one(tmp_path, jobs, one):
    # gloo connects from the larger address to the smaller: here always to the host that is asked.
    with Hosts(tmp_path, "h1", "h2", network="192.168.8") as hosts:
        hosts.resolve("h1", "127.0.1.1 h1", "192.168.8.2 h2")  # as Debian does
        hosts.resolve("h2", "192.168.8.1 h1")
        first, second = two_launchers(hosts, jobs, "late", *FEW)
        listens = "until ss -Hltn sport = :61500 | grep -q .; do sleep 0.1; done"
        with first() as first:
            hosts.run("h1", "sh", "-c", listens)
            with second() as second:
                assert (first.end(), second.end()) == (0, 0), (first.err, second.err)
    assert "job      4 processes, set by jddp.launch" in first.out
    assert_alike(result(jobs, "late")[0], one)


def test_hosts_that_are_cut_off_for_good_end_by_themselves(hosts, jobs):
    first, second = two_launchers(hosts, jobs, "cut", *LONGER, **SILENCE)
    with first() as first, second() as second:
        first.wait_for_step("cut", 40)
        hosts.set_link("h2", "down")
        cut = time.monotonic()
        codes = first.end(), second.end()
        assert time.monotonic() - cut < HEARTBEAT_SECONDS + 60
    # Whoever notices first, JAX's processes or the launchers.
    assert set(codes) <= {ExitCode.ANOTHER_FAILED, 128 + signal.SIGABRT}, (first.err, second.err)
    lost = r"node 1 was lost|JAX: unhealthy \(stopped sending heartbeats\):( [23])* \(after"
    assert re.search(lost, first.err), first.err
    lost = r"node 0 was lost|JAX: RPC: /.*CoordinationService/(Heartbeat|PollForError) \(after"
    assert re.search(lost, second.err), second.err
    # Process 0 saves, and is on one side.
    assert result(jobs, "cut")[1] < 240


def test_processes_without_a_launcher_that_hear_nothing_of_each_other_end(hosts, jobs):
    def process(number):
        job = dict(zip(VARIABLES, ("h1:1234", "2", str(number)), strict=True))
        own = {"module": "jddp train", "JAX_NUM_CPU_DEVICES": "1", **SILENCE, **job}
        return OnHost(hosts, f"h{number + 1}", jobs, *train_command("alone", *LONGER)[3:], **own)

    with process(0) as first, process(1) as second:
        first.wait_for_step("alone", 40)
        hosts.set_link("h2", "down")
        assert (first.end(), second.end()) == (-signal.SIGABRT,) * 2, (first.err, second.err)
    assert "unhealthy (stopped sending heartbeats)" in first.err
    assert "CoordinationService/Heartbeat" in second.err


def test_a_worker_killed_and_hosts_cut_off_start_over_bitwise_identically(hosts, jobs, undisturbed):
    options = ["--max-restarts", "2"]
    nodes = two_launchers(hosts, jobs, "again", *LONGER, options=options, **SILENCE)
    with ends_of(*nodes) as (first, second):
        first.wait_for_step("again", 40)
        os.kill(workers_of(hosts, "h1")[0], signal.SIGKILL)
        first.wait_for_step("again", 120)
        before = workers(hosts)
        hosts.set_link("h2", "down")
        wait_until(lambda: not before & workers(hosts), seconds=HEARTBEAT_SECONDS + 60, pause=0.1)
        hosts.set_link("h2", "up")
    for node in (first, second):
        assert re.search(r"jddp: process 0 on \S+ failed first, with signal SIGKILL", node.err)
    assert "restart 2 of 2" in first.err
    assert "resumed from step" in first.out
    assert result(jobs, "again") == undisturbed


def test_a_host_that_is_lost_with_launcher_and_memory_is_replaced_and_the_other_has_the_state(
    hosts, jobs, golden, tmp_path
):
    divided = [*LONGER, "ddp.strategy=zero1"]
    want = result(golden(*divided, "mesh.num_devices=4", num_processes=4).run_dir, ".")
    keys = ["checkpoint.every_steps=null", "checkpoint.memory_every_steps=20"]
    options = ["--max-restarts", "1"]
    first, second = two_launchers(hosts, jobs, "lost", *divided, *keys, options=options, **SILENCE)
    with first() as first, second() as lost:
        first.wait_until(lambda: [*tmp_path.glob("memory-0/*/6?.0.json")])
        hosts.end("h2")
        shutil.rmtree(tmp_path / "memory-1")
        lost.process.wait()
        with second() as second:
            assert (first.end(), second.end()) == (0, 0), (first.err, second.err)
    # If the state of step 60 was being written, the one before it is complete.
    assert int(re.search(r"resumed from step (\d+)", first.out)[1]) >= 40
    assert result(jobs, "lost") == want
    assert not [*tmp_path.glob("memory-*/*")]


@pytest.mark.long
def test_a_link_cut_for_a_moment_changes_nothing_and_a_signal_to_one_launcher_saves_on_both_hosts(
    hosts, jobs, undisturbed
):
    nodes = two_launchers(hosts, jobs, "stopped", *LONGER)
    with ends_of(*nodes, codes=(75, 75)) as (first, second):
        first.wait_for_step("stopped", 40)
        before = workers(hosts)
        hosts.set_link("h2", "down")
        time.sleep(2)  # which is the fault
        hosts.set_link("h2", "up")
        first.wait_for_step("stopped", 100)
        assert workers(hosts) == before
        second.process.send_signal(signal.SIGTERM)
    assert "failed" not in first.err + second.err
    with ends_of(*nodes) as (first, _):
        pass
    assert "resumed from step" in first.out
    assert result(jobs, "stopped") == undisturbed


def test_the_doctor_shows_a_host_that_reaches_nobody_what_is_wrong(hosts, folder):
    hosts.resolve("h2", "127.0.1.1 h2", "127.0.1.1 h1")
    job = dict(zip(VARIABLES, ("h1:61500", "2", "1"), strict=True)) | {"JDDP_START_SECONDS": "1"}
    with OnHost(hosts, "h2", folder, "--num-devices", "2", module="jddp doctor", **job) as doctor:
        assert doctor.end() == ExitCode.UNAVAILABLE
    assert "cannot reach process 0 at h1:61500: Connection refused" in doctor.err
    assert doctor.err.count("\n") == 1
    assert "h2 resolves only to 127.0.1.1" in " ".join(doctor.out.split())
