"""Connects CPU devices of several hosts, also where a host's name does not resolve to its address.

gloo, which connects them, listens on the address of its host's name. On Debian that is 127.0.1.1,
which no other host can reach, and in some containers there is none. Then the address is used by
which this host and process 0 reach each other.

The lines that gloo prints for each connection are hidden.
"""

import atexit
import contextlib
import ctypes
import ipaddress
import os
import re
import socket
import threading
from typing import BinaryIO

from jddp.distributed.coordination import listen_at, num_processes, process_index, publish, read

_SECONDS = 60.0
_KEY = "jddp/address"
_FILENO = 112  # where glibc keeps a stream's file descriptor, on every 64-bit machine
# Lines of several threads may be mixed up, word by word.
_WORDS = re.compile(rb"\[Gloo\]|[Rr]anks?|is|connected|to|peer|Expected|number|of|[.:]|\d")


def settle_address(coordinator: str) -> None:
    """Chooses gloo's address, if this host's name has no reachable one. Every process calls it.

    Args:
      coordinator: host:port of process 0, to which all are connected.
    """
    mine, there = _addresses(coordinator)
    publish(f"{_KEY}/{process_index()}", there)
    if not leads_to_itself(socket.gethostname()):
        return
    if _is_loopback(mine):  # process 0 is on this host, and others reach it by another address
        of_all = [read(f"{_KEY}/{i}", _SECONDS, of=i) for i in range(num_processes())]
        mine = next((address for address in of_all if not _is_loopback(address)), mine)
    listen_at(mine)


def leads_to_itself(name: str) -> bool:
    """Whether a name has no address, or one of loopback."""
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return True
    return _is_loopback(str(address))


def _addresses(coordinator: str) -> tuple[str, str]:
    """Addresses by which this host and the coordinator's reach each other."""
    host, _, port = coordinator.rpartition(":")
    family, *_, there = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        route.connect(there)  # which sends nothing
        return route.getsockname()[0], str(there[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def hide_connections() -> None:
    """Removes gloo's lines about connections from the output of C and C++, where libc is glibc.

    From now on C prints through a pipe; Python and its child processes print as before.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    stdout = ctypes.c_void_p.in_dll(libc, "stdout")
    number = ctypes.c_int.from_address((stdout.value or 0) + _FILENO)
    if number.value != 1:
        return  # closed, or another's
    reads, writes = os.pipe()
    thread = threading.Thread(target=_copy, args=(os.fdopen(reads, "rb"),), daemon=True)
    thread.start()

    def restore() -> None:
        libc.fflush(stdout)
        number.value = 1
        os.close(writes)
        thread.join()

    libc.fflush(stdout)
    libc.setvbuf(stdout, None, 1, 0)  # by lines, as to a terminal
    number.value = writes
    atexit.register(restore)


def _copy(printed: BinaryIO) -> None:
    num_ends = 0  # of gloo's lines, which are still to come
    for line in printed:
        num_ends += line.count(b"[Gloo] Rank ")
        if num_ends and not _WORDS.sub(b"", line).strip():
            num_ends -= 1
            continue
        with contextlib.suppress(OSError):
            os.write(1, line)
