"""A host whose link is slow: frames are held, and some are lost, by a process in its stead.

    with slow_link(hosts, "h2", delay_seconds=0.02, loss=0.01):

takes the host's own link away for good, and gives it one whose other end, on the wire, is read and
written by a program: this file. (Linux has a queue for that, netem, which few kernels are built
with; a queue that limits bandwidth, tbf, is common: `tc qdisc add dev e0 root tbf ...`.)
"""

import collections
import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time

_SET_INTERFACE, _TAP, _NO_INFORMATION = 0x400454CA, 0x0002, 0x1000  # of linux/if_tun.h
_NETWORK_NAMESPACE = 0x40000000
_LONGEST = 2048


@contextlib.contextmanager
def slow_link(hosts, name, *, delay_seconds=0.0, loss=0.0):
    """While open, what comes from or goes to the host takes longer, or is lost by this share."""
    command = [sys.executable, __file__, name, str(delay_seconds), str(loss)]
    hosts.wire("ip", "link", "delete", name)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(hosts.on_wire(*command), **pipes) as process:
        try:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            hosts.wire("ip", "link", "set", name, "master", "wire", "up")
            address = f"{hosts.addresses[name]}/24"
            hosts.wire("ip", "-n", name, "address", "add", address, "dev", "e0")
            hosts.wire("ip", "-n", name, "link", "set", "e0", "up")
            yield
        finally:
            process.kill()


def open_interface(name):
    """A new interface, as a file of its frames."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TAP | _NO_INFORMATION))
    return file


def enter_host(name):
    """Moves this process to a host's network; what it has opened stays where it is."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if libc.setns(namespace, _NETWORK_NAMESPACE) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def forward(ends, delay_seconds, loss):
    """Carries frames between two files, for ever."""
    chance = random.Random(0)
    under_way = collections.deque()  # when each is due, where, and what
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, [], [], wait)[0]:
            frame = os.read(end, _LONGEST)
            if chance.random() >= loss:
                other = ends[1] if end == ends[0] else ends[0]
                under_way.append((time.monotonic() + delay_seconds, other, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, other, frame = under_way.popleft()
            with contextlib.suppress(OSError):  # a link that is down, or full, loses it
                os.write(other, frame)


def main(name, delay_seconds, loss):
    on_wire = open_interface(name)
    enter_host(name)
    on_host = open_interface("e0")
    print("ready", flush=True)
    forward([on_wire, on_host], float(delay_seconds), float(loss))


if __name__ == "__main__":
    main(*sys.argv[1:])
