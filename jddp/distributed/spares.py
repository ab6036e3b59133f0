"""Processes that have done their imports, and wait to take the place of one that fails.

    spares = Spares(launch)
    spares.start(group)                         # while the job runs
    worker = spares.take(number, environ)       # after a failure; None if no spare fits
    spares.close()

The imports of a process take seconds, in which a restarted job would wait. So a launcher that may
restart its job starts a spare for each of its processes: the same command with the same
environment, which JAX reads at import, and with the variable WAITS. Then the program does its
imports, starts no device, and reads the variables of the next attempt from its standard input
(`jddp.commands.training.wait_for_turn`). The input ends with the launcher, even if that was killed:
then the spare exits.

Only `jddp.train` knows the variable. A program of your own may set variables of JAX before it
imports JAX, so it has no spares.
"""

import json
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from jddp.distributed.exits import WAITS
from jddp.distributed.failure_file import VARIABLE
from jddp.distributed.group import Group, Launch, Worker
from jddp.distributed.identity import JOB, VARIABLES

_PROGRAMS = {("-m", "jddp.train"), ("-m", "jddp", "train")}
_CHANGING = {WAITS, VARIABLES[0], JOB, VARIABLE}  # They differ, and no import reads them.
_DELAY_SECONDS = 5.0  # Until then the processes of the job need the cores for their own start.
_KILOBYTES = 2**20  # Memory that is free for each spare, which takes about a third of it.
_MEMORY = Path("/proc/meminfo")


class Spare(Worker):
    """A process that waits; once it has the variables of an attempt, it is a worker."""

    input = subprocess.PIPE


class Spares:
    """The spares of this machine, at most one for each process of the launch.

    Args:
      launch: Command of the processes, and number of restarts.
    """

    def __init__(self, launch: Launch) -> None:
        self._command = launch.command
        self._waiting: dict[int, Spare] = {}
        self._group: Group | None = None

    def start(self, group: Group) -> None:
        """Starts the spares that are missing, once in the life of a group; none if memory is short.

        Args:
          group: The processes that they may replace. Nothing is done in its first seconds.
        """
        if group is self._group or time.monotonic() < group.began + _DELAY_SECONDS:
            return
        self._group = group
        missing = [x for x in group.running if x.number not in self._waiting]
        is_known = _PROGRAMS & {self._command[:2], self._command[:3]}
        if is_known and available_kilobytes() > _KILOBYTES * len(missing):
            for x in missing:
                command = [sys.executable, *self._command]
                spare = Spare(x.number, command, x.environ | {WAITS: "1"}, x.log)
                self._waiting[x.number] = spare

    def take(self, number: int, environ: dict[str, str]) -> Worker | None:
        """Lets a spare run the program; returns None if there is none that fits.

        Args:
          number: Number of the process.
          environ: The environment variables of the process.
        """
        spare = self._waiting.pop(number, None)
        if spare is None:
            return None
        both = environ.keys() | spare.environ.keys()
        changed = {x: environ.get(x) for x in both if environ.get(x) != spare.environ.get(x)}
        if changed.keys() <= _CHANGING and spare.poll() is None and spare.stdin is not None:
            with suppress(OSError), spare.stdin as stdin:
                stdin.write(f"{json.dumps(changed)}\n".encode())
                spare.environ = environ
                return spare
        _end(spare)
        return None

    def close(self) -> None:
        """Ends the spares that wait."""
        while self._waiting:
            _end(self._waiting.popitem()[1])


def available_kilobytes() -> int:
    """The memory that new processes of this machine can take; 0 if it is not known."""
    with suppress(OSError):
        return int(re.findall(r"MemAvailable: +(\d+)", _MEMORY.read_text())[0])
    return 0


def _end(spare: Spare) -> None:
    spare.kill()
    spare.wait()
    spare.read_out()
    if spare.stdin is not None:
        spare.stdin.close()
