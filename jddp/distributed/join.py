"""A process joins its job, as `sources` have found out which that is.

What they say is handed to `jax.distributed` explicitly; JAX's own detection is off.
"""

import os
from collections.abc import Mapping

from jddp.distributed.connect import HEARTBEAT, START, bind_address, meet, read_seconds, time_limit
from jddp.distributed.identity import JOB, VARIABLES, Identity
from jddp.distributed.resolve import resolve_identity

__all__ = ["BIND", "JOB", "VARIABLES", "Identity", "bind_address", "initialize", "resolve_identity"]

BIND = "JAX_COORDINATOR_BIND_ADDRESS"
_LATER = 30  # seconds, after which JAX gives up too


def initialize(identity: Identity, environ: Mapping[str, str] = os.environ) -> None:
    """Joins the job, before any device is touched; a user's own `initialize` is respected.

    Raises:
      CoordinatorError: If not all processes come in JDDP_START_SECONDS.
      ProcessMismatchError: If two have the same number, were told different numbers, are of several
        jobs, as JDDP_JOB tells, or were told other JDDP_HEARTBEAT_SECONDS.
    """
    import jax

    if identity.coordinator is None or jax.distributed.is_initialized():
        return
    # JAX's handler swallows SIGTERM where nobody asks it; `stopping` has its own.
    jax.config.update("jax_enable_preemption_service", False)
    seconds, heartbeat = (read_seconds(environ, name) for name in (START, HEARTBEAT))
    listens = None
    if identity.process_id == 0:
        listens = environ.get(BIND) or bind_address(identity.coordinator)
    meet(identity, listens, environ)
    with time_limit(identity, seconds):
        jax.distributed.initialize(
            coordinator_address=identity.coordinator,
            num_processes=identity.num_processes,
            process_id=identity.process_id,
            local_device_ids=identity.local_device_ids,
            cluster_detection_method="deactivate",
            coordinator_bind_address=listens,
            initialization_timeout=seconds + _LATER,
            heartbeat_timeout_seconds=heartbeat,
        )
    from jddp.distributed.failure import watch_over_job
    from jddp.distributed.gloo import hide_connections, settle_address

    watch_over_job()
    hide_connections()
    settle_address(identity.coordinator)
