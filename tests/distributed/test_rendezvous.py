"""Processes and nodes rendezvous: all are there, or all know what is missing or differs."""

import os
import re
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import jax
import pytest
from runs import free_port, wait_until

from jddp.distributed import failure, join
from jddp.distributed import rendezvous as rendezvous_module
from jddp.distributed.identity import VARIABLES, Identity, resolve_identity
from jddp.distributed.join import HEARTBEAT, START, initialize, rendezvous
from jddp.distributed.rendezvous import Member, RendezvousClient, RendezvousServer, connect_to
from jddp.ground.errors import ConfigError, CoordinatorError, ProcessMismatchError


@pytest.fixture
def joined(monkeypatch):
    """The arguments of each call of `jax.distributed.initialize`."""
    calls = []
    monkeypatch.setattr(join, "rendezvous", lambda *_: None)
    monkeypatch.setattr(failure, "watch_over_job", lambda: None)
    monkeypatch.setattr(join, "settle_address", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: calls.append(given))
    return calls


def test_a_process_joins_the_job_of_its_environment_and_nothing_is_detected(joined, monkeypatch):
    initialize(resolve_identity({}))  # is alone
    job = dict(zip(VARIABLES, ("node-0:1234", "4", "3"), strict=True))
    for name, value in {**job, "SLURM_JOB_ID": "1"}.items():  # as in a notebook's allocation
        monkeypatch.setenv(name, value)
    initialize(resolve_identity())
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)  # by a user
    initialize(resolve_identity())
    want = {"coordinator_address": "node-0:1234", "num_processes": 4, "process_id": 3}
    want |= {"local_device_ids": None, "cluster_detection_method": "deactivate"}
    want |= {"initialization_timeout": 300, "heartbeat_timeout_seconds": 100}
    want |= {"coordinator_bind_address": None}  # which is the first process's affair
    assert joined == [want]


def test_addresses_and_time_limits_are_those_given_and_a_limit_is_a_number(joined):
    for environ, listens in (
        ({START: "7", HEARTBEAT: "8"}, "127.0.0.1:1234"),
        ({"JAX_COORDINATOR_BIND_ADDRESS": "[::]:99"}, "[::]:99"),
    ):
        initialize(Identity("127.0.0.1:1234", 2, 0), environ)
        assert joined[-1]["coordinator_bind_address"] == listens
    names = ("initialization_timeout", "heartbeat_timeout_seconds")
    assert [joined[0][name] for name in names] == [7, 8]
    for name, seconds in ((START, "0"), (HEARTBEAT, "soon"), (HEARTBEAT, "1.5")):
        with pytest.raises(ConfigError, match=f"{name}='{seconds}'"):
            initialize(Identity("127.0.0.1:1", 2, 1), {name: seconds})


@pytest.fixture
def address():
    """An address on which nobody listens."""
    return f"127.0.0.1:{free_port()}"


def test_a_process_that_cannot_reach_the_first_reports_where_it_has_tried(address):
    tried = f"process 1 of 2 cannot reach process 0 at {address}: Connection refused, "
    with pytest.raises(CoordinatorError, match=tried) as caught:
        initialize(Identity(address, 2, 1), {START: "1"})
    assert caught.value.exit_code == 69


def rendezvous_of(*processes, address, seconds=60):
    """The error of each process, or None; a process is its number, the count and variables."""

    def start(number, count, *variables):
        environ = {START: str(seconds), **dict(*variables)}
        return threads.submit(rendezvous, Identity(address, count, number), address, environ)

    with ThreadPoolExecutor(len(processes)) as threads:
        return [future.exception() for future in [start(*process) for process in processes]]


def assert_refused(errors, kind, words):
    for error in errors:
        assert isinstance(error, kind)
        assert re.match(words, str(error)), error


def test_missing_processes_are_named_to_all_and_of_many_the_first(address):
    errors = rendezvous_of((0, 5), (1, 5), (4, 5), address=address, seconds=1)
    assert_refused(errors, CoordinatorError, f"processes 2, 3 of 5 did not connect to {address}")
    errors = rendezvous_of((0, 100), address=address, seconds=1)
    assert_refused(errors, CoordinatorError, "processes 1, 2, 3, 4, 5, 6, 7, 8 and 91 more of 100")


HERE = re.escape(f"{socket.gethostname()}, pid {os.getpid()}")
A, B = {"JDDP_JOB": "a"}, {"JDDP_JOB": "b"}


@pytest.mark.parametrize(
    "others, reported",
    [
        ([(1, 3, A), (1, 3, A)], f"two have connected as process 1: {HERE}, and {HERE}"),
        ([(1, 2, A)], rf"process 1 \({HERE}\) .* count is 2 there and 3 here"),
        ([(1, 3, B)], ".*JDDP_JOB is b there and a here"),
        ([(1, 3)], ".*JDDP_JOB is not set there and a here"),
        ([(1, 3, {**A, HEARTBEAT: "9"})], f".*{HEARTBEAT} is 9 there and 100 here"),
    ],
    ids=["number", "count", "job", "no_job", "heartbeat"],
)
def test_processes_with_one_number_or_of_another_job_are_named_to_all(address, others, reported):
    errors = rendezvous_of((0, 3, A), *others, address=address)
    assert_refused(errors, ProcessMismatchError, reported)


def test_another_program_at_the_port_is_named(address):
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) as server:

        def greet():
            with server.accept()[0] as client:
                client.sendall(b"220 good day\r\n")

        with ThreadPoolExecutor() as threads:
            threads.submit(greet)
            errors = rendezvous_of((1, 2), address=address)
        assert_refused(errors, CoordinatorError, ".*is not process 0 of a starting job")
        errors = rendezvous_of((0, 2), address=address)
        assert_refused(errors, CoordinatorError, r"port \d+ of 127.0.0.1 is taken")


STRANGE = [b"1", b"[]", b"{}", b"GET / HTTP/1.1\r\n\r", b'{"kind": ' + b"[" * 10_000]
STRANGE += [b'{"kind": "node", "number": 1, "count": 2}']
STRANGE += [b'{"kind": "process", "number": [1], "count": 2}']
STRANGE += [b'{"kind": "process", "number": 1, "count": 2, "more": 3}']


def test_a_client_that_sends_nothing_or_nonsense_is_no_process(address):
    def client(said):
        opened = connect_to(address, "", time.monotonic() + 5)
        with suppress(OSError):
            opened.sendall(said)
        return opened

    with ThreadPoolExecutor() as threads:
        first = threads.submit(rendezvous_of, (0, 2), address=address, seconds=2)
        clients = [client(x) for x in (b"", b"x" * 2**20, *(line + b"\n" for line in STRANGE))]
        assert_refused(first.result(), CoordinatorError, "process 1 of 2 did not connect")
        for each in clients:
            each.close()


def test_half_a_line_holds_up_nobody(server, client, address, gather):
    with closing(connect_to(address, "", time.monotonic() + 5)) as half:
        half.sendall(b'{"kind": "node", ')
        met = gather(client, 1)
        assert sorted(gather(server, 0).result()) == sorted(met.result()) == [0, 1]


def test_the_limit_of_open_files_is_raised(address):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    rendezvous_of((0, 2), address=address, seconds=1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard


@pytest.mark.parametrize("number, name", [(0, "process 1 of 2"), (1, "process 0")])
def test_a_process_that_waits_reports_it_in_a_line_once(address, monkeypatch, capsys, number, name):
    monkeypatch.setattr(rendezvous_module, "NOTICE_SECONDS", 0.05)
    errors = rendezvous_of((number, 2), address=address, seconds=1)
    assert_refused(errors, CoordinatorError, "process 1 of 2")
    (line,) = capsys.readouterr().err.splitlines()
    assert "waiting" in line
    assert name in line
    assert address in line


@pytest.fixture
def gather():
    """A function that begins a round of one end, as member `i` of `count`, in a thread."""
    with ThreadPoolExecutor() as threads:

        def begin(end, i, count=2, **how):
            return threads.submit(end.gather, Member(i, count, **how), seconds=60)

        yield begin


@pytest.fixture
def server(address):
    with closing(RendezvousServer("node", address)) as server:
        yield server


@pytest.fixture
def client(address):
    with closing(RendezvousClient("node", address)) as client:
        yield client


def test_a_further_round_waits_for_a_lost_member_to_be_back(server, address, gather):
    clients = [RendezvousClient("node", address) for _ in range(2)]

    def assert_round(*ends):
        rounds = [gather(end, number, 3) for number, end in enumerate(ends)]
        assert [sorted(found.result()) for found in rounds] == [[0, 1, 2]] * 3

    assert_round(server, *clients)
    assert server.lost() == clients[0].lost() == []
    clients[1].close()
    wait_until(server.lost)
    assert server.lost() == [2]
    clients[1] = RendezvousClient("node", address)
    assert_round(server, *clients)
    clients[1].tell(failed=False)
    clients[1].close()
    for _ in range(100):
        assert server.lost() == []
    clients[0].tell(failed=True)
    wait_until(server.lost)
    assert server.lost() == [1]
    clients[0].close()


@pytest.mark.parametrize("failed", [False, True])
def test_a_client_does_not_wait_for_a_server_that_has_left(address, server, client, gather, failed):
    met = gather(client, 1)
    gather(server, 0).result()
    met.result()
    server.tell(failed=failed)
    server.close()
    for _ in range(100):
        lost = client.lost()
    assert lost == ([0] if failed else [])
    with pytest.raises(CoordinatorError, match=f"node 0 at {address} has left"):
        gather(client, 1).result()


def test_each_end_knows_of_a_failure_at_the_other_until_the_next_round(server, client, gather):
    client.tell(failure={"process": 3})  # before it is connected
    for end, other in ((client, server), (server, client), (client, server)):
        met = gather(client, 1)
        gather(server, 0).result()
        met.result()
        assert server.failure is client.failure is None
        end.tell(failure={"process": 1})
        while other.failure != {"process": 1}:
            assert other.lost() == []
        end.tell(failure={"process": 1})  # again, which is read in the next round


def test_a_first_that_was_lost_may_come_back(address, client, gather):
    for _ in range(2):
        with closing(RendezvousServer("node", address)) as server:
            met = gather(client, 1)
            assert gather(server, 0).result() == met.result() == {0: {}, 1: {}}
        wait_until(lambda: client.lost() == [0])
