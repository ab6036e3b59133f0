"""Processes that are watched together: start them, poll their exit codes, end them.

    group = LocalGroup(launch, place)        # the processes of a job on this machine
    while group.running and not group.failed():
        group.poll()
    group.end(moment_seconds=2, grace_seconds=10)

Each has its own session, so that its child processes end with it, and so that Ctrl-C in a terminal
does not reach it. On this machine it is killed by Linux if the launcher is. Nothing here imports
JAX.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jddp.errors import FileSystemError
from jddp.launcher import child
from jddp.launcher.cleanup import Guard
from jddp.launcher.output import Output
from jddp.launcher.workers import Launch, Place, worker_environments

POLL_SECONDS = 0.02


class Worker:
    """One process, with its output.

    Args:
      name: Number of the process in the job, or host of a launcher.
      command: The program and its arguments.
      prefix: Beginning of each line of its output in the terminal.
      log: File for its output.
      **options: Further arguments of `subprocess.Popen`.

    Attributes:
      process: Handle of the process.
      output: Standard output and standard error.
      ended: Time at which it was found to have ended.
    """

    def __init__(self, name: str, command: Sequence[str], prefix: str, log: Path, **options: Any):
        self.name, self.command = name, command
        self._started = self.ended = time.monotonic()
        pipe = subprocess.PIPE
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            command, bufsize=0, stdout=pipe, stderr=pipe, start_new_session=True, **options
        )
        self.output = Output(prefix, log, self.process)

    @property
    def code(self) -> int | None:
        """Exit code, or minus a signal; None while it runs."""
        return self.process.returncode

    @property
    def seconds(self) -> float:
        """Time that it ran."""
        return self.ended - self._started

    def kill(self) -> None:
        """Kills it and its child processes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Group:
    """Processes that are watched together.

    Attributes:
      running: The processes that run.
      ended: The others, in the order of their ends.
    """

    def __init__(self) -> None:
        self.running: list[Worker] = []
        self.ended: list[Worker] = []

    def poll(self) -> list[Worker]:
        """Records the processes that have ended, and returns them."""
        ended = [worker for worker in self.running if worker.process.poll() is not None]
        for worker in ended:
            worker.ended = time.monotonic()
            self.running.remove(worker)
        self.ended += ended
        return ended

    def wait(self, seconds: float) -> bool:
        """Waits for the end of all; returns whether all have ended."""
        until = time.monotonic() + seconds
        while True:
            self.poll()
            if not self.running:
                return True
            if time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)


class LocalGroup(Group):
    """All processes of one attempt on this machine.

    Args:
      launch: Command and number of processes.
      place: Numbers and coordinator of the processes in this attempt.

    Raises:
      ConfigError: If there are more processes than devices.
      FileSystemError: If the folder for logs cannot be written.
    """

    def __init__(self, launch: Launch, place: Place):
        super().__init__()
        environments = worker_environments(launch, place, os.environ)
        _make_logs(launch.logs)
        self._num_by_themselves: int | None = None
        self._guard = Guard()
        own = [sys.executable, "-I", "-S", child.__file__, str(os.getpid())]
        command = [*own, sys.executable, *launch.command]
        try:
            for number, environ in enumerate(environments, start=place.first):
                log = launch.logs / f"process_{number}.log"
                options = {"env": environ, "stdin": subprocess.DEVNULL}
                self.running.append(Worker(str(number), command, f"[{number}] ", log, **options))
                self._guard.watch(self.running[-1].process.pid)
        except BaseException:
            self.end(moment_seconds=0, grace_seconds=0)
            raise

    def poll(self) -> list[Worker]:
        """Records the processes that have ended, and ends their child processes."""
        ended = super().poll()
        for worker in ended:
            worker.kill()  # at once: its number may be reused
            self._guard.release(worker.process.pid)
            worker.output.close()
        return ended

    def failed(self) -> list[Worker]:
        """Processes that have failed, in order, without those that `end` has stopped."""
        return [worker for worker in self.ended[: self._num_by_themselves] if worker.code]

    def signal(self, number: int) -> None:
        """Sends a signal to each process that runs, but not to its child processes."""
        for worker in self.running:
            worker.process.send_signal(number)  # nothing is sent if it has just ended

    def end(self, *, moment_seconds: float, grace_seconds: float) -> None:
        """Ends all processes and their children: waits, then sends SIGTERM, then kills."""
        if not self.wait(moment_seconds):
            if self.failed():
                self._num_by_themselves = len(self.ended)
            self.signal(signal.SIGTERM)
            self.wait(grace_seconds)
        for worker in self.running:
            worker.kill()
            worker.process.wait()
        self.poll()
        self._guard.close()


def _make_logs(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileSystemError(f"--logs {folder}: {error.strerror}.") from error
    if not os.access(folder, os.W_OK):
        raise FileSystemError(f"--logs {folder}: it cannot be written.")
