"""How an attempt ended: the first failure, and whether a restart would repeat it."""

import json
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from jddp.distributed.failure_file import (
    ABORT,
    describe_failure,
    headline,
    read_failure,
    write_failure,
)
from jddp.distributed.group import Group, Worker
from jddp.ground.errors import ExitCode
from jddp.ground.typing import JsonObject

# Failures that a restart with the same command repeats.
DETERMINISTIC = {ExitCode.USAGE, ExitCode.DATA, ExitCode.OUT_OF_MEMORY}
DETERMINISTIC |= {ExitCode.PROCESS_MISMATCH, ExitCode.NUMERICS}
# Ends that may only be the consequence of another's: reported by jddp, or JAX's abort.
CONSEQUENCES = {ExitCode.ANOTHER_FAILED, -signal.SIGABRT}
SOON = 60.0  # seconds
_END_SECONDS = 10.0  # in which a process ends that has left its job


class Failure(NamedTuple):
    """The first failure of an attempt, as the launcher reports it.

    Attributes:
      data: The failure as data.
      headline: Process that failed, and how.
      seconds: Time that it ran.
      text: Traceback, or the end of standard error.
    """

    data: JsonObject
    headline: str
    seconds: float = 0.0
    text: str = ""

    def __str__(self) -> str:
        """The headline, and below it the text."""
        return "\n    ".join([self.headline, *self.text.splitlines()])

    @property
    def code(self) -> int:
        """Exit code of the launcher."""
        return self.data["exit_code"] or ExitCode.DATA

    def repeats(self, other: "Failure | None") -> bool:
        """Whether another attempt failed the same way, both within a minute."""
        is_known = self.code <= 128 and self.code != ExitCode.ANOTHER_FAILED
        if other is None or not is_known or max(self.seconds, other.seconds) > SOON:
            return False
        last, before = (failure.text.rpartition("\n")[2] for failure in (self, other))
        return self.code == other.code and last == before != ""


def first_failure(group: Group, lost: Sequence[int]) -> Failure | None:
    """The failure to report for an attempt; None if there is none. Nothing else decides it.

    It is the failure in the file; else the first process here that has ended by itself; else a lost
    machine; else the first process that has ended.

    Args:
      group: The processes here.
      lost: Numbers of other machines that were lost.
    """
    failed = group.failed()
    seconds = time.monotonic() - group.began
    if not failed and not lost:
        return None
    by_themselves = [worker for worker in failed if worker.returncode not in CONSEQUENCES]
    data = read_failure(group.failure_file)
    if data is None and lost and not by_themselves:
        text = f"node {lost[0]} was lost."
        reason = {"type": "jddp.launch", "message": text}
        data = describe_failure(None, ExitCode.ANOTHER_FAILED, host=None, exception=reason)
        with suppress(OSError), group.failure_file.open("x") as file:
            json.dump(data, file)  # for processes that wait for that machine
        return Failure(data, text, seconds)
    data = data or _found([*by_themselves, *failed][0], group.failure_file)
    if data["exit_code"] is None:
        _add_exit_code(data, group)
    named = [worker for worker in group.failed() if worker.number == data["process"]]
    text = f"{headline(data)} (after {seconds:.1f} s)."
    if named:
        text += f" Its whole output is in {named[0].output.path}."
    said = next((worker.output.stderr_end() for worker in (*named, *failed)), "")
    return Failure(data, text, seconds, ("" if named else data["traceback"]) or said)


def kill_overdue(group: Group, number: int) -> Failure:
    """Kills the processes that have not ended after a signal to the launcher."""
    seconds = time.monotonic() - group.began
    name = signal.Signals(number).name
    late = ", ".join(f"process {worker.number}" for worker in group.running)
    text = f"{name}: killed after --grace-seconds, because it had not ended: {late}."
    first = group.running[0].number
    group.close()
    reason = {"type": "jddp.launch", "message": text}
    data = describe_failure(first, 128 + number, exception=reason)
    write_failure(data, group.failure_file)
    return Failure(data, text, seconds)


def _add_exit_code(data: JsonObject, group: Group) -> None:
    """Waits for the end of a process that has left its job: only the end shows its exit code."""
    number = data["process"]
    group.wait(_END_SECONDS, lambda: all(worker.number != number for worker in group.running))
    for worker in group.ended:
        if worker.number == number:
            data["exit_code"] = describe_failure(number, worker.returncode)["exit_code"]
            with suppress(OSError):
                group.failure_file.write_text(json.dumps(data, indent=2) + "\n")


def _found(worker: Worker, path: Path) -> JsonObject:
    """The failure of a process that has written none."""
    data = describe_failure(worker.number, worker.returncode)
    said = worker.output.stderr_end()
    if worker.returncode == -signal.SIGABRT and (lost := ABORT.search(said)):
        data["exit_code"] = ExitCode.ANOTHER_FAILED
        data["exception"] = {"type": "JAX", "message": " ".join(lost[0].split())}
    write_failure(data, path)
    return read_failure(path) or data  # another may have been faster
