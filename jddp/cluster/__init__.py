"""Who am I among the processes of a job.

The three variables that JAX does not all read by itself are resolved here and handed to
`jax.distributed` explicitly; JAX's own detection, which takes a notebook inside a Slurm allocation
for a job, is off.
"""

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from jddp.errors import ConfigError

BIND = "JAX_COORDINATOR_BIND_ADDRESS"
JOB = "JDDP_JOB"  # the same word for all processes of a job, and another for each job
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


@dataclass(frozen=True)
class Identity:
    """One process of a job.

    Attributes:
      coordinator: host:port of process 0, or None for a job of one process.
      num_processes: Of the job.
      process_id: From 0.
    """

    coordinator: str | None = None
    num_processes: int = 1
    process_id: int = 0


def resolve_identity(environ: Mapping[str, str] = os.environ) -> Identity:
    """Reads the three variables; a job of one process where none is set.

    Raises:
      ConfigError: If only some are set, the coordinator is not host:port, or a value is not a
        number in its range.
    """
    given = {name: environ[name] for name in VARIABLES if environ.get(name)}
    if not given:
        return Identity()
    missing = [name for name in VARIABLES if name not in given]
    if missing:
        raise ConfigError(
            f"{', '.join(given)} set but {', '.join(missing)} not. A job of many processes needs "
            "all three; a job of one needs none."
        )
    coordinator, *numbers = (given[name] for name in VARIABLES)
    host, _, port = coordinator.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(
            f"{VARIABLES[0]}={coordinator!r} must be host:port, such as node-0:1234, of process 0."
        )
    if not all(number.isdecimal() for number in numbers):
        raise ConfigError(
            f"{VARIABLES[1]}={numbers[0]!r} and {VARIABLES[2]}={numbers[1]!r} must be numbers."
        )
    num_processes, process_id = map(int, numbers)
    if not process_id < num_processes:
        raise ConfigError(
            f"{VARIABLES[2]}={process_id} must be below {VARIABLES[1]}={num_processes}."
        )
    return Identity(coordinator, num_processes, process_id)


def initialize(identity: Identity, environ: Mapping[str, str] = os.environ) -> None:
    """Joins the job, before any device is touched; a user's own `initialize` is respected.

    Raises:
      DisagreementError: If processes of several jobs have met, as JDDP_JOB tells.
    """
    import jax

    if identity.coordinator is None or jax.distributed.is_initialized():
        return
    # JAX's handler swallows SIGTERM where nobody asks it; `stopping` has its own.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=identity.coordinator,
        num_processes=identity.num_processes,
        process_id=identity.process_id,
        cluster_detection_method="deactivate",
        coordinator_bind_address=environ.get(BIND)
        or (bind_address(identity.coordinator) if identity.process_id == 0 else None),
    )
    from jddp.cluster.agreement import agree

    agree("job", {JOB: environ.get(JOB, "not set")})


def bind_address(coordinator: str) -> str | None:
    """Where process 0 listens: on the interface of the coordinator's address alone.

    JAX would listen on all of them, and asks nobody who connects for a password.

    Args:
      coordinator: host:port.

    Returns:
      address:port; None, which leaves it to JAX, if the host has no address of this machine other
      than loopback, and is not meant to be loopback: then the address leads here by another way.
    """
    host, _, port = coordinator.rpartition(":")
    is_local_name = host in ("localhost", "[::1]") or host.startswith("127.")
    try:
        family, *_, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as here:
            here.bind(address)  # on any free port
    except OSError:
        return None
    if ipaddress.ip_address(address[0]).is_loopback and not is_local_name:
        return None  # Debian's 127.0.1.1, where no other host could connect
    return f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
