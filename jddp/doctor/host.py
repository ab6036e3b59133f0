"""Checks a host without JAX: its name, its limits, its interfaces."""

import ipaddress
import os
import resource
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jddp.config.versions import versions
from jddp.distributed.gpus import num_nvidia, shared_memory, small_shared_memory
from jddp.doctor.finding import BAD, OK, WARN, Finding


def check_host(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Checks this host, before JAX is initialized."""
    yield Finding(OK, ", ".join(f"{name} {version}" for name, version in versions().items()))
    name = socket.gethostname()
    yield check_name(name, addresses_of(name))
    links = _names("/sys/class/infiniband")
    yield from check_shared_memory(num_nvidia())
    yield from check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], links)
    yield from check_interfaces(_names("/sys/class/net"), links, environ)


def addresses_of(name: str) -> list[str]:
    """The addresses that a name resolves to, if any."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(address[0]).partition("%")[0] for *_, address in found})


def check_name(name: str, addresses: Sequence[str]) -> Finding:
    """Whether other hosts can reach this one by its name."""
    way_out = f"Set JAX_COORDINATOR_ADDRESS=<address>:<port>, or give {name} its own address in "
    way_out += "/etc/hosts."
    if not addresses:
        return Finding(WARN, f"{name}, the name of this host, resolves to no address.", way_out)
    listed = ", ".join(addresses)
    if all(ipaddress.ip_address(address).is_loopback for address in addresses):
        what = f"{name} resolves only to {listed}: other hosts would reach themselves by it."
        return Finding(WARN, what, f"A job on this host alone is fine. {way_out}")
    return Finding(OK, f"{name} resolves to {listed}")


def check_shared_memory(num_gpus: int) -> Iterator[Finding]:
    """Whether /dev/shm is large enough for NCCL, which may connect GPUs of a host through it."""
    small = small_shared_memory(num_gpus)
    if small is not None:
        yield Finding(BAD if num_gpus > 1 else WARN, *small)
    elif num_gpus:
        yield Finding(OK, f"/dev/shm holds {shared_memory() / 2**30:,.1f} GiB")


def check_locked_memory(limit: int, links: Sequence[str]) -> Iterator[Finding]:
    """Whether the limit of locked memory suffices for InfiniBand.

    Args:
      limit: Limit in bytes, or RLIM_INFINITY.
      links: InfiniBand devices.
    """
    if not links:
        return
    if limit == resource.RLIM_INFINITY:
        yield Finding(OK, "memory may be locked without a limit")
    else:
        what = f"Only {limit / 2**20:,.0f} MiB may be locked: InfiniBand locks what it sends."
        yield Finding(BAD, what, "Set ulimit -l unlimited; in a container --ulimit memlock=-1.")


def check_interfaces(
    interfaces: Sequence[str], links: Sequence[str], environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Whether the interfaces that NCCL is configured for exist.

    Args:
      interfaces: Names of the network interfaces.
      links: InfiniBand devices.
      environ: Environment. NCCL_SOCKET_IFNAME in it is a list of prefixes; with "=" they are whole
        names, and "^" excludes them.
    """
    rest = [name for name in interfaces if name != "lo"]
    yield Finding(OK, f"interfaces {', '.join(rest) or 'none but loopback'}")
    asked = environ.get("NCCL_SOCKET_IFNAME", "")
    if asked and not asked.startswith("^"):
        names = asked.lstrip("=").split(",")
        is_whole = asked.startswith("=")
        if not any(x == n or (x.startswith(n) and not is_whole) for x in interfaces for n in names):
            what = f"NCCL_SOCKET_IFNAME={asked}, but there is no such interface."
            yield Finding(BAD, what, f"Name one of {', '.join(interfaces)}, or leave it unset.")
    if links and environ.get("NCCL_IB_DISABLE", "0") != "0":
        what = f"NCCL_IB_DISABLE leaves {', '.join(links)} unused."
        yield Finding(WARN, what, "Unset it, unless you know that the links are bad.")
    elif links:
        yield Finding(OK, f"InfiniBand {', '.join(links)}")


def _names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).glob("*"))
