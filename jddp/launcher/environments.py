"""A launch, and the environment variables of each of its processes on this machine.

Decided before anything is started: the number, coordinator and devices of each process.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jddp.distributed.gpus import huge_pages, num_amd, num_nvidia
from jddp.distributed.identity import CUDA, JOB, ROCR, VARIABLES, visible_in
from jddp.distributed.schedulers import LAUNCHED
from jddp.errors import ConfigError


def _name_logs() -> Path:
    """A folder for the logs of a launch that begins now."""
    return Path("logs", f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


@dataclass(frozen=True)
class Launch:
    """The processes to start, and how often; options of `jddp.launch` have the same names.

    Attributes:
      command: Arguments of Python: a script or module, and its arguments.
      num_processes: Number of processes on this machine.
      num_nodes: Number of machines of the job.
      node_rank: Number of this machine.
      coordinator: host:port on node 0; None for a free port of this machine.
      devices_per_process: Number of GPUs of each process, or of CPU devices if there are no GPUs.
        None splits GPUs evenly, and leaves the number of CPU devices to JAX.
      min_processes: Smallest number of processes, on all machines, with which the job resumes after
        it has lost a machine; None for all.
      logs: Folder for the output of the processes.
      max_restarts: Number of times that all processes are restarted after one has failed.
      grace_seconds: Time from SIGTERM until a process is killed; in this time a job that a signal
        has stopped takes its last step and saves.
      ray: host:port of the head of a Ray cluster, or "auto"; None for this machine without Ray.
    """

    command: tuple[str, ...]
    num_processes: int = 1
    num_nodes: int = 1
    node_rank: int = 0
    coordinator: str | None = None
    devices_per_process: int | None = None
    min_processes: int | None = None
    logs: Path = field(default_factory=_name_logs)
    max_restarts: int = 0
    grace_seconds: float = 30.0
    ray: str | None = None


@dataclass(frozen=True)
class Place:
    """The place of this machine's processes in one attempt.

    Attributes:
      coordinator: host:port on which JAX listens in process 0.
      num_processes: Number of processes on all machines.
      first: Number of the first process here.
      job: Name of this attempt, unique to it.
      source: Launcher that has set the numbers.
    """

    coordinator: str
    num_processes: int
    first: int
    job: str
    source: str = "jddp.launch"


def environments(launch: Launch, place: Place, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment variables of each process on this machine."""
    made = []
    variable = visible_in(environ, CUDA if num_nvidia() or not num_amd() else ROCR)
    gpus = split_gpus(launch, environ, num_nvidia() or num_amd())
    for process_id, share in enumerate(gpus, start=place.first):
        own: dict[str, Any] = {JOB: place.job, LAUNCHED: place.source}
        own |= zip(VARIABLES, (place.coordinator, place.num_processes, process_id), strict=True)
        own |= {"JAX_NUM_CPU_DEVICES": launch.devices_per_process, variable: share}
        own = {name: str(value) for name, value in own.items() if value is not None}
        # A kill loses buffered output.
        made.append({"PYTHONUNBUFFERED": "1", **environ, **huge_pages(environ), **own})
    return made


def split_gpus(launch: Launch, environ: Mapping[str, str], num_there: int) -> list[str | None]:
    """The visible GPUs of this machine, split over its processes; None for each without any.

    Raises:
      ConfigError: If there are fewer GPUs than the processes need.
    """
    listed = environ.get(visible_in(environ), ",".join(map(str, range(num_there))))
    visible = [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]
    if not visible or environ.get("JAX_PLATFORMS") == "cpu" or num_there == 0:
        return [None] * launch.num_processes
    share = launch.devices_per_process or len(visible) // launch.num_processes
    if share * launch.num_processes > len(visible) or share == 0:
        raise ConfigError(
            f"{launch.num_processes} processes need {max(share, 1)} GPUs each, and "
            f"{len(visible)} GPUs are visible: {','.join(visible)}. Start fewer processes, or set "
            "JAX_PLATFORMS=cpu."
        )
    firsts = range(0, share * launch.num_processes, share)
    return [",".join(visible[first : first + share]) for first in firsts]
