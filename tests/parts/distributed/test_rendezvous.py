"""Who am I among the processes, and who else has come."""

import contextlib
import dataclasses
import itertools
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import jax
import pytest
import runs

from jddp.distributed import failure, join
from jddp.distributed.identity import VARIABLES, Identity
from jddp.distributed.join import HEARTBEAT, START, initialize, rendezvous
from jddp.distributed.rendezvous import Member, RendezvousClient, connect
from jddp.distributed.rendezvous_server import RendezvousServer
from jddp.distributed.resolve import resolve_identity
from jddp.errors import ConfigError, CoordinatorError, ProcessMismatchError

JOB = dict(zip(VARIABLES, ("node-0:1234", "4", "3"), strict=True))


def test_the_environment_is_where_a_process_finds_its_number(monkeypatch):
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    assert resolve_identity() == Identity("node-0:1234", 4, 3)


@pytest.fixture
def joined(monkeypatch):
    """What `jax.distributed.initialize` was called with."""
    calls = []
    monkeypatch.setattr(join, "rendezvous", lambda *_: None)
    monkeypatch.setattr(failure, "watch_over_job", lambda: None)
    monkeypatch.setattr(join, "settle_address", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: calls.append(given))
    return calls


def test_a_process_of_a_job_joins_it_with_nothing_left_to_detection(joined, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")  # as in a notebook inside an allocation
    initialize(resolve_identity(JOB))
    want = {
        "coordinator_address": "node-0:1234",
        "num_processes": 4,
        "process_id": 3,
        "local_device_ids": None,
        "cluster_detection_method": "deactivate",
        "initialization_timeout": 330,
        "heartbeat_timeout_seconds": 100,
        "coordinator_bind_address": None,  # which is the first process's affair
    }
    assert joined == [want]


@pytest.mark.parametrize(
    "environ, listens",
    [({}, "127.0.0.1:1234"), ({"JAX_COORDINATOR_BIND_ADDRESS": "[::]:99"}, "[::]:99")],
)
def test_the_first_process_listens_where_it_is_asked_to(joined, environ, listens):
    initialize(Identity("127.0.0.1:1234", 2, 0), environ)
    assert joined[0]["coordinator_bind_address"] == listens


def test_a_process_that_is_alone_joins_nothing_and_a_job_that_the_user_has_joined_is_left(
    joined, monkeypatch
):
    initialize(resolve_identity({}))
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    initialize(resolve_identity(JOB))
    assert joined == []


def test_a_process_that_cannot_reach_the_first_says_where_it_has_tried(free_port):
    identity, environ = Identity(f"127.0.0.1:{free_port}", 2, 1), {"JDDP_START_SECONDS": "1"}
    tried = f"process 1 of 2 cannot reach process 0 at 127.0.0.1:{free_port}: Connection refused, "
    with pytest.raises(CoordinatorError, match=tried) as caught:
        initialize(identity, environ)
    assert caught.value.exit_code == 69


@pytest.fixture
def free_port():
    """A port on which nobody listens."""
    return runs.free_port()


def test_a_time_limit_that_is_no_number_is_refused_and_others_are_those_given(joined):
    for name, seconds in itertools.product([START, HEARTBEAT], ["0", "soon", "1.5"]):
        with pytest.raises(ConfigError, match=f"{name}='{seconds}' must be a positive"):
            initialize(Identity("127.0.0.1:1", 2, 1), {name: seconds})
    initialize(Identity("127.0.0.1:1234", 2, 1), dict.fromkeys((START, HEARTBEAT), "7"))
    assert (joined[0]["initialization_timeout"], joined[0]["heartbeat_timeout_seconds"]) == (37, 7)


def connect_all(identities, seconds=60):
    """Connects processes; returns what each of them gets: None, or an error."""
    environ = {"JDDP_START_SECONDS": str(seconds)}
    with ThreadPoolExecutor(len(identities)) as threads:
        futures = [
            threads.submit(rendezvous, identity, identity.coordinator, environ | variables)
            for identity, variables in identities
        ]
        return [future.exception() for future in futures]


@pytest.fixture
def address(free_port):
    return f"127.0.0.1:{free_port}"


def process(free_port, number, count, **variables):
    return Identity(f"127.0.0.1:{free_port}", count, number), variables


def test_processes_connect_in_any_order(free_port):
    # JAX listens as soon as they have connected, at the same port: here something else does.
    def listens():
        with socket.create_server(("127.0.0.1", free_port)) as server:
            for _ in range(3):
                server.accept()[0].close()

    with ThreadPoolExecutor() as threads:
        others = [threads.submit(connect_all, [process(free_port, i, 4)]) for i in (3, 1, 2)]
        assert connect_all([process(free_port, 0, 4)]) == [None]
        threads.submit(listens).result()
        assert [other.result() for other in others] == [[None]] * 3


def test_missing_processes_are_named_to_all_and_of_many_the_first(free_port):
    errors = connect_all([process(free_port, i, 5) for i in (0, 1, 4)], seconds=1)
    where = f"127.0.0.1:{free_port} within 1 s"
    for error in errors:
        assert isinstance(error, CoordinatorError)
        start = f"processes 2, 3 of 5 did not connect to {where}. Was each started"
        assert str(error).startswith(start)
    (error,) = connect_all([process(free_port, 0, 100)], seconds=1)
    start = "processes 1, 2, 3, 4, 5, 6, 7, 8 and 91 more of 100 did not connect"
    assert str(error).startswith(start)


def test_two_of_one_number_are_named_with_where_they_run(free_port):
    errors = connect_all([process(free_port, i, 3) for i in (0, 1, 1)])
    where = rf"{socket.gethostname()}, pid {os.getpid()}"
    reported = f"two have connected as process 1: {where}, and {where}. Give each"
    for error in errors:
        assert isinstance(error, ProcessMismatchError)
        assert str(error).startswith(reported)


def test_processes_of_another_count_or_job_do_not_connect_and_are_named(free_port):
    other, heartbeat = r"process 1 \(.*\) has another job .*: JDDP_JOB is", "JDDP_HEARTBEAT_SECONDS"
    for count, variables, reported in (
        (3, {"JDDP_JOB": "a"}, ".* another job than process 0: count is 3 there and 2 here"),
        (2, {"JDDP_JOB": "b"}, f"{other} b there and a here"),
        (2, {}, f"{other} not set there and a here"),
        (2, {"JDDP_JOB": "a", heartbeat: "9"}, f".*: {heartbeat} is 9 there and 100 here"),
    ):
        second = process(free_port, 1, count, **variables)
        for error in connect_all([process(free_port, 0, 2, JDDP_JOB="a"), second]):
            assert isinstance(error, ProcessMismatchError)
            assert re.match(reported, str(error))


def test_a_port_that_is_taken_is_reported(free_port):
    with socket.create_server(("127.0.0.1", free_port)):
        (error,) = connect_all([process(free_port, 0, 2)])
    assert isinstance(error, CoordinatorError)
    assert str(error).startswith(f"port {free_port} of 127.0.0.1 is taken.")


def test_a_program_that_speaks_another_language_is_not_taken_for_process_0(free_port):
    def listens():
        server = socket.create_server(("127.0.0.1", free_port))
        with server, server.accept()[0] as client:
            client.sendall(b"220 good day\r\n")

    with ThreadPoolExecutor() as threads:
        threads.submit(listens)
        (error,) = connect_all([process(free_port, 1, 2)])
    assert isinstance(error, CoordinatorError)
    assert "is not process 0 of a starting job" in str(error)


STRANGE = [
    b"1",
    b"[]",
    b"{}",
    b'{"kind": "node", "number": 1, "count": 2}',
    b'{"kind": "process", "number": [1], "count": 2}',
    b'{"kind": "process", "number": 1, "count": 2, "same": 3}',
    b'{"kind": "process", "number": 1, "count": 2, "more": 3}',
    b'{"kind": "process", "number": 1, "count": 2, "where": 3}',
    b'{"kind": ' + b"[" * 10_000,
]


def test_a_client_that_sends_nothing_or_nonsense_is_no_process(free_port):
    def client(said=b""):
        opened = connect(f"127.0.0.1:{free_port}", "", time.monotonic() + 5)
        with contextlib.suppress(OSError):
            opened.sendall(said)
        return opened

    with ThreadPoolExecutor() as threads:
        first = threads.submit(connect_all, [process(free_port, 0, 2)], seconds=2)
        lines = [line + b"\n" for line in STRANGE]
        clients = [client(said) for said in (b"", b"GET / HTTP/1.1\r\n\r\n", *lines, b"x" * 2**20)]
        (error,) = first.result()
        for each in clients:
            each.close()
    assert str(error).startswith("process 1 of 2 did not connect")


def test_a_further_round_leaves_out_lost_members_and_takes_new_ones(address):
    members = [Member(i, 3, info={"processes": 2}) for i in range(3)]

    def has_two(infos):
        return len(infos) >= 2

    def gather(end, i):
        return threads.submit(end.gather, members[i], seconds=60)

    with (
        ThreadPoolExecutor() as threads,
        closing(RendezvousServer("node", address, is_enough=has_two)) as server,
    ):
        clients = [RendezvousClient("node", address) for _ in range(2)]
        rounds = [gather(server, 0), gather(clients[0], 1), gather(clients[1], 2)]
        assert all(sorted(said.result()) == [0, 1, 2] for said in rounds)
        assert not server.has_newcomer()
        assert server.lost() == clients[0].lost() == []
        clients[1].close()
        while not server.lost():
            time.sleep(0.005)
        assert server.lost() == [2]
        rounds = [gather(server, 0), gather(clients[0], 1)]
        assert all(sorted(said.result()) == [0, 1] for said in rounds)
        with closing(RendezvousClient("node", address)) as impostor:
            elsewhere = dataclasses.replace(members[1], where="elsewhere, pid 1")
            turned_away = threads.submit(impostor.gather, elsewhere, seconds=60)
            while not turned_away.done():
                assert not server.has_newcomer()
            assert "another has already connected as node 1" in str(turned_away.exception())
        clients[1] = RendezvousClient("node", address)
        back = gather(clients[1], 2)
        while not server.has_newcomer():
            assert not back.done()
        rounds = [gather(server, 0), gather(clients[0], 1), back]
        assert all(sorted(said.result()) == [0, 1, 2] for said in rounds)
        clients[1].say_goodbye(failed=False)
        clients[1].close()
        for _ in range(100):
            assert server.lost() == []
        clients[0].say_goodbye(failed=True)
        while not server.lost():
            time.sleep(0.005)
        assert server.lost() == [1]
        for client in clients:
            client.close()


def test_a_machine_that_was_lost_without_a_sign_is_noticed_when_it_is_back(address):
    with (
        ThreadPoolExecutor() as threads,
        closing(RendezvousServer("node", address)) as server,
        closing(RendezvousClient("node", address)) as before,
        closing(RendezvousClient("node", address)) as after,
    ):
        met = threads.submit(before.gather, Member(1, 2), seconds=60)
        server.gather(Member(0, 2), seconds=60)
        met.result()
        back = threads.submit(after.gather, Member(1, 2), seconds=60)
        while not server.has_newcomer():
            assert not back.done()
        assert server.lost() == [1]
        assert sorted(server.gather(Member(0, 2), seconds=60)) == sorted(back.result()) == [0, 1]


@pytest.mark.parametrize("failed", [False, True])
def test_a_client_does_not_wait_for_a_server_that_said_goodbye(address, failed):
    with ThreadPoolExecutor() as threads, closing(RendezvousClient("node", address)) as client:
        with closing(RendezvousServer("node", address)) as server:
            met = threads.submit(client.gather, Member(1, 2), seconds=60)
            server.gather(Member(0, 2), seconds=60)
            assert met.result()
            server.say_goodbye(failed=failed)
        for _ in range(100):
            lost = client.lost()
        assert lost == ([0] if failed else [])
        with pytest.raises(CoordinatorError, match=f"node 0 at {address} has left"):
            client.gather(Member(1, 2), seconds=60)


def test_the_first_knows_of_a_failure_elsewhere_until_the_next_round(address):
    with (
        ThreadPoolExecutor() as threads,
        closing(RendezvousServer("node", address)) as server,
        closing(RendezvousClient("node", address)) as client,
    ):
        client.send_failure({"process": 3})  # before it is connected
        for _ in range(2):
            met = threads.submit(client.gather, Member(1, 2), seconds=60)
            server.gather(Member(0, 2), seconds=60)
            assert met.result()
            assert server.failure is None
            client.send_failure({"process": 1})
            while server.failure is None:
                assert server.lost() == []
            assert server.failure == {"process": 1}


def test_a_first_that_was_lost_may_come_back(address):
    with ThreadPoolExecutor() as threads, closing(RendezvousClient("node", address)) as client:
        for _ in range(2):
            with closing(RendezvousServer("node", address)) as server:
                met = threads.submit(client.gather, Member(1, 2), seconds=60)
                assert server.gather(Member(0, 2), seconds=60) == met.result() == {0: {}, 1: {}}
            while client.lost() != [0]:
                time.sleep(0.005)


def test_the_first_process_waits_for_its_own_name_to_be_known(free_port, monkeypatch):
    look_up, names = socket.getaddrinfo, iter(["unknown", "unknown"])

    def late(host, *arguments, **how):
        if host == "pod-0" and next(names, None):
            raise socket.gaierror("not known yet")
        return look_up("127.0.0.1" if host == "pod-0" else host, *arguments, **how)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    first = Identity(f"pod-0:{free_port}", 2, 0)
    with ThreadPoolExecutor() as threads:
        met = threads.submit(rendezvous, first, f"127.0.0.1:{free_port}", {})
        with closing(RendezvousClient("process", f"127.0.0.1:{free_port}")) as client:
            client.gather(Member(1, 2, {"JDDP_JOB": "not set", HEARTBEAT: "100"}), seconds=60)
        assert met.result() is None
    assert list(names) == []


@pytest.mark.processes
def test_a_first_process_that_waits_in_vain_says_so(free_port):
    environ = {**os.environ, "JDDP_START_SECONDS": "1"}
    environ |= dict(zip(VARIABLES, (f"127.0.0.1:{free_port}", "2", "0"), strict=True))
    command = [sys.executable, "-m", "jddp.train"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 69, done.stderr
    assert done.stderr.startswith(f"jddp: process 1 of 2 did not connect to 127.0.0.1:{free_port}")
    assert done.stderr.count("\n") == 1
