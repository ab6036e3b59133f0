"""Finds the process for which the others of a job wait, and the phase in which it is slow.

Replicas synchronize in each step, so all steps are as slow as those of the slowest process, and the
others spend the time waiting for it. At each record every process publishes its own times through
the coordination service. Process 0 reads those of all at an earlier record: no device and no
process waits for this.

    find_slowest([own, of, each, process])      # Slowest(process=2, phase="data", ratio=1.4)

A process that others wait for waits for none. So the least time on devices, of all processes, is
near to what the slowest devices need, and the probes show which devices these are.
"""

import contextlib
import itertools
import json
import socket
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

import jddp.distributed.coordination as job
from jddp.trainer.clock import Spent
from jddp.trainer.probe import Probe
from jddp.typing import JsonObject

SLOW = 1.2  # times the others
NUM_RECORDS = 3  # in a row, before a process is reported
WAYS_OUT = {
    "data": "look at its disk and its network, or read in more processes (data.num_workers)",
    "compute": "look at temperature, clocks and other programs of its devices",
    "host": "look at callbacks, at the disk of the run directory and at other programs",
}
_numbers = itertools.count()


class Own(NamedTuple):
    """Times of a process by itself.

    Attributes:
      host: Name of its machine.
      probe: Seconds of a product on its devices.
      spent: Seconds per step.
    """

    host: str
    probe: float
    spent: Spent


class Slowest(NamedTuple):
    """The process for which the others wait.

    Attributes:
      process: Number of the process.
      phase: "data", "compute" or "host": where it takes longer than the others.
      ratio: Own time of the process over that of the others, without their waiting for it.
    """

    process: int
    phase: str
    ratio: float


def find_slowest(of_all: Sequence[Own]) -> Slowest:
    """Returns the process that takes the longest by itself.

    Args:
      of_all: Times of each process, two or more, in their order.
    """
    slowest_probe = max(own.probe for own in of_all)
    devices = min(own.spent.devices for own in of_all)
    phases = [
        {
            "data": own.spent.data,
            "compute": devices * own.probe / slowest_probe,
            "host": own.spent.host,
        }
        for own in of_all
    ]
    process = max(range(len(phases)), key=lambda number: sum(phases[number].values()))
    mine = phases.pop(process)
    usual = {name: statistics.median(x[name] for x in phases) for name in mine}
    phase = max(mine, key=lambda name: mine[name] - usual[name])
    return Slowest(process, phase, sum(mine.values()) / sum(usual.values()))


class Processes:
    """The comparison of the processes of a job; of one process there is nothing to compare.

    Args:
      note: Function that prints a sentence.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._key = f"jddp/spent/{next(_numbers)}"
        self._num_published = self._num_read = 0
        self._slow: tuple[int, str] | None = None
        self._num_slow = 0
        self._probe: Probe | None = None

    def begin(self, devices: Sequence[jax.Device]) -> None:
        """Measures the devices of this process for the first time."""
        if job.num_processes() > 1:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # no memory is left for it
                self._probe = Probe(devices)

    def measure(self, newest: jax.Array) -> None:
        """Measures the devices again, from time to time.

        Args:
          newest: Array that is ready when the devices have finished.
        """
        if self._probe is not None:
            self._probe.renew(newest)

    def compare(self, spent: Spent) -> JsonObject:
        """Publishes the times of this process; returns fields about an earlier record of all.

        Args:
          spent: Time of this process since the last record.
        """
        if self._probe is None:
            return {}
        self._num_published += 1
        name = f"{self._key}/{self._num_published}/{job.process_index()}"
        job.try_publish(name, json.dumps([socket.gethostname(), self._probe.seconds, spent]))
        return self._read() if job.process_index() == 0 else {}

    def _read(self) -> JsonObject:
        """Fields about the newest record before this one that all processes have published."""
        fields: JsonObject = {}
        while self._num_read < self._num_published - 1:
            name = f"{self._key}/{self._num_read + 1}"
            texts = job.published(name)
            if len(texts) < job.num_processes():
                break
            self._num_read += 1
            job.unpublish(name)
            rows = [json.loads(texts[process]) for process in sorted(texts)]
            fields = self._fields([Own(host, probe, Spent(*spent)) for host, probe, spent in rows])
        return fields

    def _fields(self, of_all: Sequence[Own]) -> JsonObject:
        found = find_slowest(of_all)
        host = of_all[found.process].host
        self._watch(found, host)
        return {
            "slowest_process": found.process,
            "slowest_host": host,
            "slowest_phase": found.phase,
            "slowest_ratio": found.ratio,
        }

    def _watch(self, found: Slowest, host: str) -> None:
        """Reports a process that is slow in some records in a row, once."""
        slow = (found.process, found.phase) if found.ratio > SLOW else None
        self._num_slow = self._num_slow + 1 if slow == self._slow else 1
        self._slow = slow
        if slow is not None and self._num_slow == NUM_RECORDS:
            self._note(
                f"process {found.process} on {host} is {found.ratio:.1f} times slower than the "
                f"others, in {found.phase}, and they wait for it: {WAYS_OUT[found.phase]}"
            )
