"""The processes of an attempt on this machine: start them, poll their exit codes, end them.

    group = Group(launch, place)
    while group.running and not group.failed():
        group.poll()
    group.close(moment_seconds=2, grace_seconds=30)

Each process has its own session, so that its child processes end with it, and so that Ctrl-C in a
terminal does not reach it. All are killed if the launcher is killed (`apart`). Nothing here
imports JAX.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from jddp.distributed.apart import kill_group, started_apart
from jddp.distributed.failure_file import VARIABLE
from jddp.errors import file_errors
from jddp.launcher.environments import Launch, Place, environments
from jddp.launcher.output import Output

POLL_SECONDS = 0.02


class Worker(subprocess.Popen[bytes]):
    """One process, with its output.

    Args:
      number: Number of the process in the job.
      command: The program and its arguments.
      environ: The environment variables of the process.
      log: File for its output.

    Attributes:
      number: Number of the process in the job.
      output: Standard output and standard error.
    """

    def __init__(self, number: int, command: Sequence[str], environ: dict[str, str], log: Path):
        pipes: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        pipes["stdin"] = subprocess.DEVNULL
        super().__init__(command, bufsize=0, env=environ, start_new_session=True, **pipes)
        self.number = number
        self.output = Output(f"[{number}] ", log, self)

    def kill(self) -> None:
        """Kills it and its child processes."""
        kill_group(self.pid)


class Cleanup:
    """Kills the process groups that it watches if this process ends without closing it."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._input = self._open.enter_context(started_apart("cleanup"))

    def watch(self, groups: Iterable[int]) -> None:
        """Replaces the process groups."""
        with suppress(OSError):  # it was killed
            self._input.write(f"{' '.join(map(str, groups))}\n".encode())

    def close(self) -> None:
        """Ends the guard."""
        self._open.close()


class Group:
    """All processes of one attempt on this machine.

    Args:
      launch: Command and number of processes.
      place: Numbers and coordinator of the processes in this attempt.

    Attributes:
      running: The processes that run.
      ended: The processes that have ended, in that order.
      began: Time of the start, by `time.monotonic`.
      failure_file: File for the first failure of this attempt.

    Raises:
      ConfigError: If there are more processes than devices.
      FileSystemError: If the folder for logs cannot be written.
    """

    def __init__(self, launch: Launch, place: Place):
        self.began = time.monotonic()
        self.failure_file = file = launch.logs.absolute() / f"failure_{place.job}.json"
        environs = environments(launch, place, os.environ | {VARIABLE: str(file)})
        with file_errors(f"--logs {launch.logs}"):
            launch.logs.mkdir(parents=True, exist_ok=True)
            if not os.access(launch.logs, os.W_OK):
                raise PermissionError(0, "it cannot be written")
        self.running = list[Worker]()
        self.ended = list[Worker]()
        self._guard = Cleanup()
        self._num_sent = 0
        self._grace_seconds = launch.grace_seconds
        self._until = math.inf
        try:
            for number, environ in enumerate(environs, start=place.first):
                log = launch.logs / f"process_{number}.log"
                self.running.append(Worker(number, [sys.executable, *launch.command], environ, log))
                self._guard.watch(worker.pid for worker in self.running)
        except BaseException:
            self.close()
            raise

    def poll(self) -> None:
        """Records the processes that have ended, and ends their child processes."""
        for worker in [x for x in self.running if x.poll() is not None]:
            self.running.remove(worker)
            self.ended.append(worker)
            worker.kill()  # at once: its number may be reused
            self._guard.watch(worker.pid for worker in self.running)
            worker.output.close()

    def wait(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Waits until all have ended, `is_over`, or time is up; returns whether all have ended."""
        until = time.monotonic() + seconds
        self.poll()
        while self.running and time.monotonic() <= until and not is_over():
            time.sleep(POLL_SECONDS)
            self.poll()
        return not self.running

    def failed(self) -> list[Worker]:
        """Processes that have failed, in order; after `close` also those that it has stopped."""
        return [worker for worker in self.ended if worker.returncode]

    def signal(self, number: int) -> None:
        """Sends a signal to each process that runs, but not to its child processes."""
        for worker in self.running:
            worker.send_signal(number)  # nothing is sent if it has just ended

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
            worker.kill()
            worker.wait()
        self.poll()
        self._guard.close()
