"""A process joins its job, under the identity that `resolve` has found.

The identity is passed to `jax.distributed` explicitly; JAX's own detection is off.
"""

import os
from collections.abc import Mapping

from jddp.distributed.connect import (
    HEARTBEAT,
    START,
    bind_address,
    read_seconds,
    rendezvous,
    time_limit,
)
from jddp.distributed.identity import Identity

BIND = "JAX_COORDINATOR_BIND_ADDRESS"
_LATER = 30  # seconds, after which JAX gives up too


def initialize(identity: Identity, environ: Mapping[str, str] = os.environ) -> None:
    """Joins the job, before devices are used; nothing is done if your code has joined already.

    Raises:
      CoordinatorError: If processes are missing after JDDP_START_SECONDS.
      ProcessMismatchError: If two have the same number, or counts, JDDP_JOB or
        JDDP_HEARTBEAT_SECONDS differ.
    """
    import jax

    if identity.coordinator is None or jax.distributed.is_initialized():
        return
    # JAX's handler swallows SIGTERM in programs that do not query it; `stopping` has its own.
    jax.config.update("jax_enable_preemption_service", False)
    seconds, heartbeat = (read_seconds(environ, name) for name in (START, HEARTBEAT))
    listens = None
    if identity.process_id == 0:
        listens = environ.get(BIND) or bind_address(identity.coordinator)
    rendezvous(identity, listens, environ)
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
