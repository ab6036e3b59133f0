"""Who am I among the processes of a job.

The three variables that JAX does not all read by itself are resolved here and handed to
`jax.distributed` explicitly; JAX's own detection, which takes a notebook inside a Slurm allocation
for a job, is off.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from jddp.errors import ConfigError

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


def initialize(identity: Identity) -> None:
    """Joins the job, before any device is touched; a user's own `initialize` is respected."""
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
    )
