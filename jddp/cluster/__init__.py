"""A process joins its job, as `sources` have found out which that is.

What they say is handed to `jax.distributed` explicitly; JAX's own detection is off.
"""

import ipaddress
import os
import socket
from collections.abc import Mapping

from jddp.cluster.identity import JOB, VARIABLES, Identity
from jddp.cluster.meeting import reach, start_seconds, time_limit
from jddp.cluster.sources import resolve_identity

__all__ = ["BIND", "JOB", "VARIABLES", "Identity", "bind_address", "initialize", "resolve_identity"]

BIND = "JAX_COORDINATOR_BIND_ADDRESS"
_LATER = 30  # seconds, after which JAX gives up too


def initialize(identity: Identity, environ: Mapping[str, str] = os.environ) -> None:
    """Joins the job, before any device is touched; a user's own `initialize` is respected.

    Raises:
      CoordinatorError: If process 0 cannot be reached in JDDP_START_SECONDS.
      DisagreementError: If processes of several jobs have met, as JDDP_JOB tells.
    """
    import jax

    if identity.coordinator is None or jax.distributed.is_initialized():
        return
    # JAX's handler swallows SIGTERM where nobody asks it; `stopping` has its own.
    jax.config.update("jax_enable_preemption_service", False)
    seconds = start_seconds(environ)
    if identity.process_id > 0:
        reach(identity, seconds)
    with time_limit(identity, seconds):
        jax.distributed.initialize(
            coordinator_address=identity.coordinator,
            num_processes=identity.num_processes,
            process_id=identity.process_id,
            local_device_ids=identity.local_device_ids,
            cluster_detection_method="deactivate",
            coordinator_bind_address=environ.get(BIND)
            or (bind_address(identity.coordinator) if identity.process_id == 0 else None),
            initialization_timeout=int(seconds) + _LATER,
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
