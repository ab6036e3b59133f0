"""CPU devices of several hosts find each other, wherever the hosts' own names lead.

gloo, which connects them, listens where the name of its host leads. On Debian that is 127.0.1.1, to
which no other host comes, and in some containers nowhere. Then the address counts under which this
host and process 0 reach each other.
"""

import ipaddress
import socket

from jddp.coordination import listen_at, num_processes, process_index, publish, read

_SECONDS = 60.0
_KEY = "jddp/address"


def settle_address(coordinator: str) -> None:
    """Chooses where gloo listens, if the name of this host does not say so. Every process calls it.

    Args:
      coordinator: host:port of process 0, to which all are connected.
    """
    mine, there = _way_to(coordinator)
    publish(f"{_KEY}/{process_index()}", there)
    if not leads_to_itself(socket.gethostname()):
        return
    if _is_loopback(mine):  # process 0 is on this host, to which others come by another address
        told = [read(f"{_KEY}/{i}", _SECONDS, of=i) for i in range(num_processes())]
        mine = next((address for address in told if not _is_loopback(address)), mine)
    listen_at(mine)


def leads_to_itself(name: str) -> bool:
    """Whether a name leads to loopback, or nowhere."""
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return True
    return _is_loopback(str(address))


def _way_to(coordinator: str) -> tuple[str, str]:
    """Addresses of this host and of the other, on the way there."""
    host, _, port = coordinator.rpartition(":")
    family, *_, there = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(there)  # which sends nothing
        return way.getsockname()[0], str(there[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
