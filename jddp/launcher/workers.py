"""What a launch starts, and what each of its processes on this machine is told.

Decided before anything is started: who each is, where they meet, and which devices are whose.
"""

import glob
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jddp.distributed.identity import JOB, VARIABLES
from jddp.distributed.resolve import LAUNCHED
from jddp.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """What to start.

    Attributes:
      command: What Python is to run, with its arguments.
      num_processes: On this machine.
      num_nodes: Machines of the job.
      node_rank: Which of them this is.
      coordinator: host:port on node 0; None for a free port of this machine.
      devices_per_process: CPU devices of each, or GPUs where there are any; None leaves the first
        to JAX, and splits the second evenly.
      min_processes: Of all machines, with which the job goes on if one is lost; None for all.
      logs: Folder for what the processes say.
    """

    command: tuple[str, ...]
    num_processes: int
    num_nodes: int = 1
    node_rank: int = 0
    coordinator: str | None = None
    devices_per_process: int | None = None
    min_processes: int | None = None
    logs: Path = Path("logs")


@dataclass(frozen=True)
class Place:
    """That of this machine's processes in one attempt.

    Attributes:
      coordinator: host:port on which JAX listens in the first process of all.
      num_processes: Of all machines.
      first: Number of the first process here.
      job: A word of this attempt's own.
    """

    coordinator: str
    num_processes: int
    first: int
    job: str


def name_logs() -> Path:
    """A folder for the logs of a launch that begins now."""
    return Path("logs", f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


def worker_environments(
    launch: Launch, place: Place, environ: Mapping[str, str]
) -> list[dict[str, str]]:
    """What each process on this machine is told."""
    environments = []
    for process_id, share in enumerate(split_gpus(launch, environ), start=place.first):
        numbers = (place.coordinator, str(place.num_processes), str(process_id))
        told = dict(zip(VARIABLES, numbers, strict=True)) | {JOB: place.job, LAUNCHED: "1"}
        if launch.devices_per_process is not None:
            told["JAX_NUM_CPU_DEVICES"] = str(launch.devices_per_process)
        if share is not None:
            told["CUDA_VISIBLE_DEVICES"] = share
        # What was said before a kill is to be read after it.
        environments.append({"PYTHONUNBUFFERED": "1", **environ, **told})
    return environments


def split_gpus(
    launch: Launch, environ: Mapping[str, str], num_there: int | None = None
) -> list[str | None]:
    """GPUs of each process, of those that are visible here; None where there are none to share.

    Raises:
      ConfigError: If there are fewer than the processes need.
    """
    told = environ.get("CUDA_VISIBLE_DEVICES")
    if num_there is None:
        num_there = len(glob.glob("/dev/nvidia[0-9]*"))
    visible = told.split(",") if told is not None else list(map(str, range(num_there)))
    visible = [name.strip() for name in visible if name.strip() not in ("", "-1")]
    if not visible or environ.get("JAX_PLATFORMS") == "cpu" or num_there == 0:
        return [None] * launch.num_processes
    share = launch.devices_per_process or len(visible) // launch.num_processes
    if share * launch.num_processes > len(visible) or share == 0:
        raise ConfigError(
            f"{launch.num_processes} processes with {max(share, 1)} GPUs each, and "
            f"{len(visible)} are visible: {','.join(visible)}. Start fewer, or set "
            "JAX_PLATFORMS=cpu."
        )
    return [
        ",".join(visible[local * share : (local + 1) * share])
        for local in range(launch.num_processes)
    ]
