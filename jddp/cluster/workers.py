"""What a launch starts, and what each of its processes on this machine is told.

Decided before anything is started: where they meet, who each is, and which devices are whose.
"""

import errno
import glob
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jddp.cluster.identity import JOB, VARIABLES, check_address
from jddp.cluster.sources import LAUNCHED
from jddp.errors import ConfigError, CoordinatorError

LOCAL = "127.0.0.1"


@dataclass(frozen=True)
class Launch:
    """What to start.

    Attributes:
      command: What Python is to run, with its arguments.
      num_processes: On this machine, and as many on each other node.
      num_nodes: Of the job.
      node_rank: Which of them this is.
      coordinator: host:port on node 0; None for a free port of this machine.
      devices_per_process: CPU devices of each, or GPUs where there are any; None leaves the first
        to JAX, and splits the second evenly.
      logs: Folder for what the processes say.
    """

    command: tuple[str, ...]
    num_processes: int
    num_nodes: int = 1
    node_rank: int = 0
    coordinator: str | None = None
    devices_per_process: int | None = None
    logs: Path = Path("logs")


def worker_environments(
    launch: Launch, attempt: int, environ: Mapping[str, str]
) -> list[dict[str, str]]:
    """What each process on this machine is told."""
    coordinator = _choose_coordinator(launch, attempt)
    job = secrets.token_hex(8)
    if launch.num_nodes > 1:  # which have to find the same word
        job = "/".join([environ.get(JOB, ""), coordinator, str(attempt)])
    count = str(launch.num_nodes * launch.num_processes)
    shares = split_gpus(launch, environ)
    environments = []
    for local, share in enumerate(shares):
        process_id = str(launch.node_rank * launch.num_processes + local)
        told = dict(zip(VARIABLES, (coordinator, count, process_id), strict=True))
        told |= {JOB: job, LAUNCHED: "1"}
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


def _choose_coordinator(launch: Launch, attempt: int) -> str:
    if launch.coordinator is None:
        with socket.socket() as free:
            free.bind((LOCAL, 0))
            return f"{LOCAL}:{free.getsockname()[1]}"
    host, _, port = launch.coordinator.rpartition(":")
    address = check_address(f"{host}:{int(port) + attempt}", "--coordinator")
    if launch.node_rank == 0:
        _refuse_taken(address)
    return address


def _refuse_taken(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        family, *_, found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as here:
            here.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            here.bind(found)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CoordinatorError(
                f"port {port} of {host} is taken. Choose another with --coordinator, or leave it "
                "out on one machine."
            ) from error
