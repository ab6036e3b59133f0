"""Preflight checks of a machine: its name, limits, interfaces and GPUs; each comes with its fix.

findings = [*check_host(), *check_busy()]      # before JAX takes the memory of GPUs
findings += check_devices(missing)             # once JAX has devices
"""

import ipaddress
import os
import resource
import socket
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from jddp.config.versions import versions
from jddp.distributed.gpus import (
    FLAG,
    ON_PURPOSE,
    Missing,
    driver_version,
    lacks_atomics,
    list_gpus,
    list_programs,
    num_nvidia,
    shared_memory,
    small_shared_memory,
)
from jddp.engine.mesh import kinds_of

OK, WARN, BAD = "ok", "warn", "bad"
COLUMNS = 80
_IDLE_MIB = 1024  # Maximum memory of a GPU that a driver takes by itself.


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
      level: "ok"; "warn", if it may slow a job down or confuse; "bad", if it will stop a job.
      what: Description of the finding.
      fix: Fix, if the level is not ok.
    """

    level: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        """Lines of at most 80 columns, the first with the level."""
        head = f"  {self.level:<4}  "
        rest = " " * 8
        what = textwrap.wrap(self.what, COLUMNS, initial_indent=head, subsequent_indent=rest)
        fix = textwrap.wrap(self.fix, COLUMNS, initial_indent=rest, subsequent_indent=rest)
        return "\n".join([*what, *fix])


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


def check_busy() -> Iterator[Finding]:
    """Lists used memory and programs of each GPU that `nvidia-smi` reports as in use."""
    gpus, programs = list_gpus(), list_programs()
    is_busy = False
    for number, gpu in enumerate(gpus):
        names = [f"{name} ({pid})" for uuid, pid, name in programs if uuid == gpu.uuid]
        if names or (gpu.used_mib or 0) > _IDLE_MIB:
            is_busy = True
            by = ", ".join(names) or "programs that are not visible from here"
            what = f"GPU {number} ({gpu.kind}) is in use by {by}"
            if gpu.used_mib is not None and gpu.total_mib is not None:
                what += f": {gpu.used_mib:,} of {gpu.total_mib:,} MiB"
            fix = "Choose other GPUs with CUDA_VISIBLE_DEVICES, or let programs share a GPU with "
            yield Finding(WARN, f"{what}.", f"{fix}XLA_PYTHON_CLIENT_PREALLOCATE=false.")
    if gpus and not is_busy:
        yield Finding(OK, f"{len(gpus)} GPUs, and no other program on them")


def check_devices(missing: Missing | None = None) -> Iterator[Finding]:
    """Checks the devices of this process.

    Args:
      missing: The missing part, if CPUs are used although a GPU was to be expected.
    """
    here, everywhere = jax.local_devices(), jax.devices()
    kind = f"{here[0].platform} devices here ({here[0].device_kind})"
    yield Finding(OK, f"{len(here)} {kind}, {len(everywhere)} in all")
    if mixed := kinds_of(everywhere):
        what = f"The devices are {mixed}: each step waits for the slowest."
        yield Finding(WARN, what, "Choose with CUDA_VISIBLE_DEVICES, or exclude the host.")
    if missing is not None:
        yield Finding(BAD, f"JAX runs on CPUs. {missing.what}", f"{missing.fix} {ON_PURPOSE}")
    if here[0].platform == "gpu":
        runtime = str(here[0].client.platform_version)
        if (version := driver_version()) is not None:
            yield Finding(OK, f"NVIDIA driver {version}")
        yield from check_atomics(runtime, os.environ)


def check_atomics(runtime: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether this jaxlib compiles atomic adds for the GPUs.

    Args:
      runtime: Runtime of JAX, such as "PJRT C API cuda 12090".
      environ: Environment, with XLA_FLAGS.
    """
    if "cuda" in runtime and lacks_atomics(environ):
        what = "jaxlib 0.10.2 to 0.11.0 add gradients of embeddings up to 450 times slower."
        fix = (
            f"jddp.train sets XLA_FLAGS={FLAG}; set it for your own programs, or use a newer JAX, "
        )
        yield Finding(WARN, what, f"{fix}which needs Python 3.12.")
