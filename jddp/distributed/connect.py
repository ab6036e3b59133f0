"""Processes connect within a time limit, or each reports what is missing.

JAX waits five minutes and aborts, with a page about its own tasks. Here processes hold a rendezvous
on the same port before JAX starts, and JAX's own connecting has a time limit.
"""

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping

from jddp.distributed.identity import JOB, Identity
from jddp.distributed.rendezvous import Member, RendezvousClient, connect
from jddp.distributed.rendezvous_server import RendezvousServer
from jddp.errors import ConfigError, ExitCode, report

START, HEARTBEAT = "JDDP_START_SECONDS", "JDDP_HEARTBEAT_SECONDS"
_DEFAULTS = {START: "300", HEARTBEAT: "100"}
_POLL_SECONDS = 0.1


def read_seconds(environ: Mapping[str, str], name: str) -> int:
    """How long processes wait for each other: to START, or for a sign of life, a HEARTBEAT.

    Raises:
      ConfigError: If that is not a positive number.
    """
    text = environ.get(name) or _DEFAULTS[name]
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"{name}={text!r} must be a positive number of seconds.")
    return int(text)


def rendezvous(identity: Identity, listens: str | None, environ: Mapping[str, str]) -> None:
    """Returns when all processes are there, and JAX may listen, or listens.

    Args:
      identity: Identity of this process.
      listens: host:port on which process 0 listens; None for the others.
      environ: The environment.

    Raises:
      CoordinatorError: If processes are missing after the time limit.
      ProcessMismatchError: If two have the same number, or different settings.
    """
    assert identity.coordinator is not None
    seconds = read_seconds(environ, START)
    heartbeat = str(read_seconds(environ, HEARTBEAT))
    same = {JOB: environ.get(JOB, "not set"), HEARTBEAT: heartbeat}
    mine = Member(identity.process_id, identity.num_processes, same)
    if identity.process_id == 0:
        with contextlib.closing(
            RendezvousServer("process", identity.coordinator, listens)
        ) as server:
            server.gather(mine, seconds=seconds, is_last=True)
        _wait_for_name(identity.coordinator, time.monotonic() + seconds)
        return
    with contextlib.closing(RendezvousClient("process", identity.coordinator)) as client:
        client.gather(mine, seconds=seconds)
    me = f"process {mine.number} of {mine.count}"
    jax_listens = connect(identity.coordinator, me, time.monotonic() + seconds)
    assert jax_listens is not None
    jax_listens.close()


def _wait_for_name(coordinator: str, until: float) -> None:
    """Waits until this process can look up its own name, which JAX retries only twice a minute."""
    host = coordinator.rpartition(":")[0].strip("[]")
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            socket.getaddrinfo(host, None)
            return
        time.sleep(_POLL_SECONDS)


def bind_address(coordinator: str) -> str:
    """The address on which process 0 listens: of the coordinator's interface alone.

    JAX would listen on all interfaces, and without authentication.

    Args:
      coordinator: host:port of process 0.

    Returns:
      address:port; of all interfaces if the host's name has no address of this machine but
      loopback, and is no name of loopback: then other hosts reach it by another address.
    """
    host, _, port = coordinator.rpartition(":")
    everywhere = f"[::]:{port}" if socket.has_dualstack_ipv6() else f"0.0.0.0:{port}"
    is_local_name = host in ("localhost", "[::1]") or host.startswith("127.")
    try:
        family, *_, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as here:
            here.bind(address)  # on any free port
    except OSError:
        return everywhere
    if ipaddress.ip_address(address[0]).is_loopback and not is_local_name:
        return everywhere  # Debian's 127.0.1.1, where no other host could connect
    return f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"


@contextlib.contextmanager
def time_limit(identity: Identity, seconds: float) -> Iterator[None]:
    """While open, ends this process when the time is over, since JAX's wait cannot be interrupted.

    JAX ends it as well, a little later, with an abort.
    """
    timer = threading.Timer(seconds, _give_up, (identity, seconds))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(identity: Identity, seconds: float) -> None:
    report(
        f"process {identity.process_id} of {identity.num_processes} has waited {seconds:.0f} s for "
        f"JAX to connect all of them, at {identity.coordinator}. One has connected and left."
    )
    os._exit(ExitCode.UNAVAILABLE)
