"""The processes of a job on this machine: start them, hear how they end, end them.

    group = Group(launch, place)
    while group.num_running() and not group.failed():
        group.look()
    group.end(moment_seconds=2, grace_seconds=10)

Each is a session of its own, so that whatever it has started ends with it, and is killed by Linux
if the launcher is. Nothing here imports JAX.
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
      process_id: Of the job.
      process: Of this machine.
      output: What it says.
      code: Its exit code, or minus a signal; None while it runs.
      seconds: That it ran.
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
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        streams = (self.process.stdout, self.process.stderr)
        self.output = Output(f"[{process_id}] ", log, streams)
        self.code: int | None = None
        self.seconds = 0.0

    def has_just_ended(self) -> bool:
        """True once, after which `code` and `seconds` are known."""
        if self.code is not None or self.process.poll() is None:
            return False
        self.code, self.seconds = self.process.returncode, time.monotonic() - self._started
        return True

    def kill(self) -> None:
        """Kills it, and all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Group:
    """All processes of one attempt on this machine.

    Args:
      launch: What to start.
      place: Of its processes, in this attempt.

    Raises:
      ConfigError: If there are more processes than devices.
      FileSystemError: If nothing can be written into the folder for logs.
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

    def look(self) -> None:
        """Finds out who has ended, and ends what they have started."""
        for worker in self.workers:
            if worker.has_just_ended():
                self._ended.append(worker)
                worker.kill()  # at once: some day its number will be another's
                self._guard.release(worker.process.pid)
                worker.output.close()

    def failed(self) -> list[Worker]:
        """Those that have ended badly, the first one first, but for those that `end` has asked."""
        return [worker for worker in self._ended[: self._num_by_themselves] if worker.code]

    def num_running(self) -> int:
        """How many have not ended."""
        return sum(worker.code is None for worker in self.workers)

    def signal(self, number: int) -> None:
        """Sends a signal to each process that runs, but not to what it has started."""
        for worker in self.workers:
            if worker.code is None:
                worker.process.send_signal(number)  # to nobody, if it has just ended

    def wait(self, seconds: float) -> bool:
        """Waits for the end of all; says whether it came."""
        until = time.monotonic() + seconds
        while True:
            self.look()
            if not self.num_running():
                return True
            if time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)

    def end(self, *, moment_seconds: float, grace_seconds: float) -> None:
        """Leaves nothing running: waits, then asks, then kills, with all they have started."""
        if not self.wait(moment_seconds):
            if self.failed():
                self._num_by_themselves = len(self._ended)
            self.signal(signal.SIGTERM)
            self.wait(grace_seconds)
        for worker in self.workers:
            if worker.code is None:
                worker.kill()
                worker.process.wait()
        self.look()
        self._guard.close()


def _make_logs(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileSystemError(f"--logs {folder}: {error.strerror}.") from error
    if not os.access(folder, os.W_OK):
        raise FileSystemError(f"--logs {folder}: nothing can be written there.")
