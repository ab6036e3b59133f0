"""The processes of a job on this machine: start them, poll their exit codes, end them.

    group = Group(launch, place)
    while group.num_running() and not group.failed():
        group.poll()
    group.end(moment_seconds=2, grace_seconds=10)

Each has its own session, so that its child processes end with it, and is killed by Linux if the
launcher is. Nothing here imports JAX.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from jddp.errors import FileSystemError
from jddp.launcher import child
from jddp.launcher.cleanup import Guard
from jddp.launcher.output import Output
from jddp.launcher.workers import Launch, Place, worker_environments

POLL_SECONDS = 0.02


class Worker:
    """One process.

    Attributes:
      process_id: Number of the process in the job.
      process: Handle of the process.
      output: Standard output and standard error.
      code: Exit code, or minus a signal; None while it runs.
      seconds: Time that it ran.
    """

    def __init__(self, process_id: int, command: list[str], environ: Mapping[str, str], log: Path):
        self.process_id = process_id
        self._started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), *command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.output = Output(f"[{process_id}] ", log, self.process)
        self.code: int | None = None
        self.seconds = 0.0

    def has_just_ended(self) -> bool:
        """Whether it has ended since the last call; then `code` and `seconds` are set."""
        if self.code is not None or self.process.poll() is None:
            return False
        self.code, self.seconds = self.process.returncode, time.monotonic() - self._started
        return True

    def kill(self) -> None:
        """Kills it and its child processes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Group:
    """All processes of one attempt on this machine.

    Args:
      launch: Command and number of processes.
      place: Numbers and coordinator of the processes in this attempt.

    Raises:
      ConfigError: If there are more processes than devices.
      FileSystemError: If the folder for logs cannot be written.
    """

    def __init__(self, launch: Launch, place: Place):
        environments = worker_environments(launch, place, os.environ)
        _make_logs(launch.logs)
        self.workers: list[Worker] = []
        self._ended: list[Worker] = []  # in their order
        self._num_by_themselves: int | None = None
        self._guard = Guard()
        try:
            for process_id, environ in enumerate(environments, start=place.first):
                log = launch.logs / f"process_{process_id}.log"
                command = [sys.executable, *launch.command]
                self.workers.append(Worker(process_id, command, environ, log))
                self._guard.watch(self.workers[-1].process.pid)
        except BaseException:
            self.end(moment_seconds=0, grace_seconds=0)
            raise

    def poll(self) -> None:
        """Records the processes that have ended, and ends their child processes."""
        for worker in self.workers:
            if worker.has_just_ended():
                self._ended.append(worker)
                worker.kill()  # at once: its number may be reused
                self._guard.release(worker.process.pid)
                worker.output.close()

    def failed(self) -> list[Worker]:
        """Processes that have failed, in order, without those that `end` has stopped."""
        return [worker for worker in self._ended[: self._num_by_themselves] if worker.code]

    def num_running(self) -> int:
        """Number of processes that run."""
        return sum(worker.code is None for worker in self.workers)

    def signal(self, number: int) -> None:
        """Sends a signal to each process that runs, but not to its child processes."""
        for worker in self.workers:
            if worker.code is None:
                worker.process.send_signal(number)  # nothing is sent if it has just ended

    def wait(self, seconds: float) -> bool:
        """Waits for the end of all; returns whether all have ended."""
        until = time.monotonic() + seconds
        while True:
            self.poll()
            if not self.num_running():
                return True
            if time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)

    def end(self, *, moment_seconds: float, grace_seconds: float) -> None:
        """Ends all processes and their children: waits, then sends SIGTERM, then kills."""
        if not self.wait(moment_seconds):
            if self.failed():
                self._num_by_themselves = len(self._ended)
            self.signal(signal.SIGTERM)
            self.wait(grace_seconds)
        for worker in self.workers:
            if worker.code is None:
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
