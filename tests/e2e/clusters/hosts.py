"""Machines of one network, each a network namespace of this machine with a name and an address."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

# Where names of namespaces live, and the wire: nobody else sees either. The input ends with the
# block or with the tests, also where those are killed: then all that runs on the hosts is killed.
_MAKE_NETWORK = """
set -eu
mkdir -p /run/netns
mount -t tmpfs none /run/netns
ip link set lo up
ip link add wire type bridge
ip address add {network}.254/24 dev wire
ip link set wire up
echo ready
cat
set +e
for host in $(ls /run/netns); do
    while pids=$(ip netns pids $host) && [ -n "$pids" ]; do
        kill -KILL $pids
        sleep 0.02
    done
done
"""
_MAKE_HOST = """
set -eu
ip netns add {name}
ip link add {link} type veth peer name e0 netns {name}
ip link set {link} master wire up
ip -n {name} link set lo up
ip -n {name} address add {address}/24 dev e0
ip -n {name} link set e0 up
"""
_ENTER_HOST = """
set -eu
mount --bind "$1" /etc/hosts
hostname "$2"
shift 2
exec "$@"
"""


class Hosts:
    """Machines that reach each other by name; ended with the block, with all that runs on them."""

    def __init__(self, scratch: Path, *names: str, network: str = "10.8.0"):
        refuse_without("ip", "nsenter", "unshare")
        self.addresses = {name: f"{network}.{i}" for i, name in enumerate(names, start=1)}
        self.scratch = scratch
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--net", "sh", "-c", _MAKE_NETWORK.format(network=network)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # It outlives a signal to the group of the tests.
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n"
        for name, address in self.addresses.items():
            link = name[-15:]  # which is the longest that Linux takes
            self.wire("sh", "-c", _MAKE_HOST.format(name=name, address=address, link=link))
            self.resolve(name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._holder.communicate(timeout=10)

    def resolve(self, name: str, *lines: str) -> None:
        """Replaces a host's /etc/hosts: all names, or the lines given."""
        ordinary = [f"{address} {other}" for other, address in self.addresses.items()]
        text = "\n".join(["127.0.0.1 localhost", *(lines or ordinary)]) + "\n"
        self._hosts_file(name).write_text(text)

    def has_asked(self, name: str) -> bool:
        """Whether a host has looked into its /etc/hosts since that was written last."""
        found = self._hosts_file(name).stat()
        return found.st_atime_ns > found.st_mtime_ns

    def wire(self, *command: str) -> str:
        """Runs a command where the wire is; returns what it prints."""
        command = self.on_wire(*command)
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def on_wire(self, *command: str) -> list[str]:
        """The command that runs another where the wire is, as the same process."""
        here = ["sh", "-c", 'exec nsenter --wdns="$(pwd -P)" "$@"', "sh"]  # else it is /
        return [*here, "--target", str(self._holder.pid), "--mount", "--net", *command]

    def command(self, name: str, *command: str) -> list[str]:
        """The command that runs another on a host, as the same process."""
        on_host = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c"]
        inside = [_ENTER_HOST, "sh", str(self._hosts_file(name)), name, *command]
        return self.on_wire(*on_host, *inside)

    def start(self, name: str, *command: str, **how) -> subprocess.Popen:
        return subprocess.Popen(self.command(name, *map(str, command)), **how)

    def run(self, name: str, *command: str, **how) -> subprocess.CompletedProcess:
        options = {"capture_output": True, "text": True, "timeout": 120} | how
        return subprocess.run(self.command(name, *map(str, command)), **options)

    def set_link(self, name: str, state: str) -> None:
        """Takes a host's link "down", or "up" again."""
        self.wire("ip", "-n", name, "link", "set", "e0", state)

    def pids(self, name: str) -> list[int]:
        return [int(pid) for pid in self.wire("ip", "netns", "pids", name).split()]

    def end(self, name: str) -> None:
        """Kills what runs on a host, as pulling its plug would."""
        until = time.monotonic() + 10
        while pids := self.pids(name):
            assert time.monotonic() < until, f"{pids} do not end"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _hosts_file(self, name: str) -> Path:
        return self.scratch / f"hosts-of-{name}"


def refuse_without(*programs: str) -> None:
    """Skips a test that needs these programs, or root; in CI that is a failure."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    if os.geteuid() != 0:
        pytest.skip("only root makes namespaces")
