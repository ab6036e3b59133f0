"""Preflight checks of a machine: its name, limits and GPUs; each comes with its fix.

findings = [*check_host()]
findings += check_devices(missing)             # once JAX has devices
"""

import ipaddress
import socket
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from jddp.config.versions import versions
from jddp.distributed.gpus import (
    ON_PURPOSE,
    Missing,
    driver_version,
    num_nvidia,
    shared_memory,
    small_shared_memory,
)

OK, WARN, BAD = "ok", "warn", "bad"
COLUMNS = 80


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


def check_host() -> Iterator[Finding]:
    """Checks this host, before JAX is initialized."""
    yield Finding(OK, ", ".join(f"{name} {version}" for name, version in versions().items()))
    name = socket.gethostname()
    yield check_name(name, addresses_of(name))
    yield from check_shared_memory(num_nvidia())


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


def check_devices(missing: Missing | None = None) -> Iterator[Finding]:
    """Checks the devices of this process.

    Args:
      missing: The missing part, if CPUs are used although a GPU was to be expected.
    """
    here, everywhere = jax.local_devices(), jax.devices()
    kind = f"{here[0].platform} devices here ({here[0].device_kind})"
    yield Finding(OK, f"{len(here)} {kind}, {len(everywhere)} in all")
    if len(kinds := Counter(device.device_kind for device in everywhere)) > 1:
        mixed = " and ".join(f"{num} x {kind}" for kind, num in kinds.items())
        what = f"The devices are {mixed}: each step waits for the slowest."
        yield Finding(WARN, what, "Choose with CUDA_VISIBLE_DEVICES, or exclude the host.")
    if missing is not None:
        yield Finding(BAD, f"JAX runs on CPUs. {missing.what}", f"{missing.fix} {ON_PURPOSE}")
    if here[0].platform == "gpu" and (version := driver_version()) is not None:
        yield Finding(OK, f"NVIDIA driver {version}")
