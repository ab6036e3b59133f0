"""The machines that tests make of namespaces are machines to what runs on them."""

import socket

import pytest

from clusters.hosts import Hosts

pytestmark = pytest.mark.processes
_SAY = "import socket; print(socket.gethostname(), socket.gethostbyname('h2'))"
_GREET = "import socket; socket.create_connection(('h1', 1234), timeout=1).recv(9)"


@pytest.fixture
def hosts(tmp_path):
    with Hosts(tmp_path, "h1", "h2") as hosts:
        yield hosts


def test_a_host_has_a_name_and_knows_the_others(hosts):
    mine = socket.gethostname()
    assert hosts.run("h1", "python3", "-c", _SAY).stdout == f"h1 {hosts.addresses['h2']}\n"
    hosts.resolve("h1", "127.0.1.1 h1", "10.8.0.9 h2")
    assert hosts.run("h1", "python3", "-c", _SAY).stdout == "h1 10.8.0.9\n"
    assert socket.gethostname() == mine


def test_hosts_reach_each_other_until_a_link_is_down(hosts):
    listen = "import socket; s = socket.create_server(('h1', 1234)); print('here', flush=True)"
    greet = "[s.accept()[0].send(b'good day') for _ in range(9)]"
    with hosts.start("h1", "python3", "-c", f"{listen}; {greet}", stdout=-1, text=True) as server:
        assert server.stdout.readline() == "here\n"
        assert hosts.run("h2", "python3", "-c", _GREET).returncode == 0
        hosts.set_link("h2", "down")
        assert hosts.run("h2", "python3", "-c", _GREET).returncode == 1
        hosts.set_link("h2", "up")
        assert hosts.run("h2", "python3", "-c", _GREET).returncode == 0
        hosts.end("h1")
        assert server.wait(5) == -9
    assert hosts.pids("h1") == []
