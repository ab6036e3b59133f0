"""The processes of an attempt on this machine: start them, watch them, end them.

Their numbers, coordinator, devices and environment variables are decided before any is started.

    group = Group(launch, place, workers={})
    while group.running and not group.failed():
        group.poll()
    group.close(moment_seconds=2, grace_seconds=30)

Each process has its own session: its child processes end with it, and Ctrl-C in a terminal does not
reach it. All are killed if the launcher is killed (`apart`). Nothing here imports JAX.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jddp.distributed.apart import kill_group, started_apart
from jddp.distributed.failure_file import VARIABLE
from jddp.distributed.gpus import has_gpu, num_nvidia
from jddp.distributed.identity import JOB, LAUNCHED, NVIDIA, VARIABLES, visible_in
from jddp.distributed.worker import POLL_SECONDS, Worker
from jddp.ground.errors import ConfigError, file_errors

# Huge pages: a step on CPUs that is bound by memory has fewer page faults (benchmarks/README.md).
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_FORKING = (("-m", "jddp.train"), ("-m", "jddp"))  # Other programs do not fork a spare.


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
      min_processes: Smallest number of processes with which a job on Ray resumes after the loss of
        a machine; None for all.
      logs: Folder for the output of the processes.
      max_restarts: Number of times that all processes are restarted after one has failed.
      grace_seconds: Time from SIGTERM until a process is killed. A job that a signal has stopped
        takes its last step and saves in this time.
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
    """

    coordinator: str
    num_processes: int
    first: int
    job: str


def environments(launch: Launch, place: Place, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment variables of each process on this machine."""
    defaults = {"PYTHONUNBUFFERED": "1"} | ({} if has_gpu(environ) else HUGE_PAGES)
    made = []
    variable = visible_in(environ)
    gpus = split_gpus(launch, environ, num_nvidia())
    for process_id, share in enumerate(gpus, start=place.first):
        own: dict[str, Any] = {JOB: place.job, LAUNCHED: "Ray" if launch.ray else "jddp.launch"}
        own |= zip(VARIABLES, (place.coordinator, place.num_processes, process_id), strict=True)
        own |= {"JAX_NUM_CPU_DEVICES": launch.devices_per_process, variable: share}
        own = {name: str(value) for name, value in own.items() if value is not None}
        made.append({**defaults, **environ, **own})
    return made


def split_gpus(launch: Launch, environ: Mapping[str, str], num_there: int) -> list[str | None]:
    """The visible GPUs of this machine, split over its processes; None for each without any.

    Raises:
      ConfigError: If there are fewer GPUs than the processes need.
    """
    listed = environ.get(visible_in(environ), ",".join(map(str, range(num_there))))
    visible = [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]
    # NVIDIA's variable may list GPUs that are not there.
    is_there = num_there > 0 or visible_in(environ) != NVIDIA
    if not visible or environ.get("JAX_PLATFORMS") == "cpu" or not is_there:
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


class Group:
    """All processes of one attempt on this machine.

    Args:
      launch: Command and number of processes.
      place: Numbers and coordinator of the processes in this attempt.
      workers: The processes of earlier attempts by their numbers; others are added.

    Attributes:
      running: The processes that run.
      ended: The processes that have ended, in that order.
      began: Time of the start, by `time.monotonic`.
      failure_file: File for the first failure of this attempt.

    Raises:
      ConfigError: If there are more processes than devices.
      FileSystemError: If the folder for logs cannot be written.
    """

    def __init__(self, launch: Launch, place: Place, workers: dict[int, Worker]):
        self.began = time.monotonic()
        self.failure_file = file = launch.logs.absolute() / f"failure_{place.job}.json"
        environs = environments(launch, place, os.environ | {VARIABLE: str(file)})
        with file_errors(f"--logs {launch.logs}"):
            launch.logs.mkdir(parents=True, exist_ok=True)
            if not os.access(launch.logs, os.W_OK):
                raise PermissionError(0, "it cannot be written")
        self.running = list[Worker]()
        self.ended = list[Worker]()
        self._open = ExitStack()
        self._guard = self._open.enter_context(started_apart("cleanup"))
        self._num_sent = 0
        self._grace_seconds = launch.grace_seconds
        self._until = float("inf")
        try:
            for number, environ in enumerate(environs, start=place.first):
                if number not in workers:
                    log = launch.logs / f"process_{number}.log"
                    may_fork = launch.max_restarts > 0 and launch.command[:2] in _FORKING
                    workers[number] = Worker(number, launch.command, log, may_fork=may_fork)
                workers[number].begin(environ)
                self.running.append(workers[number])
                self._guard_running()
        except BaseException:
            self.close()
            raise

    def poll(self) -> None:
        """Records the processes that have ended, and ends their child processes."""
        for worker in [x for x in self.running if x.poll() is not None]:
            self.running.remove(worker)
            self.ended.append(worker)
            kill_group(worker.pid)  # At once: the number may be reused.
            self._guard_running()
            worker.read_out()

    def _guard_running(self) -> None:
        """Sends the numbers of the running processes to the program that kills them in the end."""
        with suppress(OSError):  # That program was killed.
            self._guard.write(f"{' '.join(str(worker.pid) for worker in self.running)}\n".encode())

    def wait(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Waits until all have ended, `is_over`, or time is up; returns whether all have ended."""
        until = time.monotonic() + seconds
        self.poll()
        while self.running and time.monotonic() <= until and not is_over():
            time.sleep(POLL_SECONDS)
            self.poll()
        return not self.running

    def failed(self) -> list[Worker]:
        """Processes that have failed, in order; after `close` also the processes it has stopped."""
        return [worker for worker in self.ended if worker.returncode]

    def signal(self, number: int) -> None:
        """Sends a signal to each process that runs, but not to its child processes."""
        for worker in self.running:
            if worker.poll() is None:  # It may have just ended.
                os.kill(worker.pid, number)

    def forward(self, signals: Sequence[int]) -> int:
        """Sends the signals that were not sent before; returns the number of all signals."""
        for number in signals[self._num_sent :]:
            self.signal(number)
        if signals and self._num_sent == 0:
            self._until = time.monotonic() + self._grace_seconds
        self._num_sent = len(signals)
        return self._num_sent

    @property
    def is_overdue(self) -> bool:
        """Whether a process still runs when the grace period after the first signal is over."""
        return bool(self.running) and time.monotonic() > self._until

    def close(self, *, moment_seconds: float = 0.0, grace_seconds: float = 0.0) -> None:
        """Ends all processes and their children: waits, then sends SIGTERM, then kills."""
        if not self.wait(moment_seconds):
            self.signal(signal.SIGTERM)
            self.wait(grace_seconds)
        for worker in self.running:
            kill_group(worker.pid)
        self.wait(float("inf"))
        self._open.close()
