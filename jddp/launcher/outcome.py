"""How an attempt ended: the first failure, and whether a restart would repeat it."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from jddp.errors import ExitCode
from jddp.launcher.group import Worker

# Failures that a restart with the same command repeats.
DETERMINISTIC = {ExitCode.USAGE, ExitCode.DATA, ExitCode.OUT_OF_MEMORY}
DETERMINISTIC |= {ExitCode.PROCESS_MISMATCH, ExitCode.NUMERICS}
# Ends that may only be the consequence of another's: reported by jddp, or JAX's abort.
CONSEQUENCES = {ExitCode.ANOTHER_FAILED, -signal.SIGABRT}
SOON = 60.0  # seconds
# JAX's message before its abort: a process had no heartbeat of another for too long.
_SILENT = re.compile(r"unhealthy \(stopped sending heartbeats\):\s+(\d+(?:\s+\d+)*)")
_COORDINATOR = re.compile(r"RPC: /\S*CoordinationService/(?:Heartbeat|PollForError)")


@dataclass(frozen=True)
class Failure:
    """The first failure of an attempt.

    Attributes:
      code: Exit code of the launcher; 128 and a signal's number for a signal.
      headline: Process that failed, and how.
      seconds: Time that it ran.
      stderr: End of its standard error.
    """

    code: int
    headline: str
    seconds: float = 0.0
    stderr: str = ""

    def repeats(self, other: "Failure | None") -> bool:
        """Whether another attempt failed the same way, both within a minute."""
        if other is None or max(self.seconds, other.seconds) > SOON or self.code > 128:
            return False
        return self.code == other.code and self._last_line() == other._last_line() != ""

    def _last_line(self) -> str:
        return self.stderr.rpartition("\n")[2]


def first_failure(failed: Sequence[Worker], lost: Sequence[int]) -> Failure | None:
    """The failure to report of an attempt; None if there is none.

    Args:
      failed: Processes here that have failed, in order.
      lost: Numbers of other machines that were lost.
    """
    if not failed and not lost:
        return None
    failures = [_describe(worker) for worker in failed if worker.code not in CONSEQUENCES]
    failures += [remote for worker in failed if (remote := _reported(worker))]
    failures += [Failure(ExitCode.ANOTHER_FAILED, f"node {node} was lost.") for node in lost]
    return [*failures, *(_describe(worker) for worker in failed)][0]


def _describe(worker: Worker) -> Failure:
    code = worker.code or 0
    how = f"exit code {code}"
    if code < 0:
        how, code = f"signal {signal.Signals(-code).name}", 128 - code
        if how.endswith("SIGKILL"):
            how += " (unless it was sent by hand, the machine was out of memory)"
        lost = lost_processes(worker.output.stderr_end())
        if how.endswith("SIGABRT") and lost is not None:
            how += f": JAX has lost {lost}, or the connection to it"
    verb = "ended because another did" if worker.code in CONSEQUENCES else "failed first"
    headline = (
        f"process {worker.name} {verb}, with {how}, after {worker.seconds:.1f} s. "
        f"Its whole output is in {worker.output.path}."
    )
    return Failure(code, headline, worker.seconds, worker.output.stderr_end())


def _reported(worker: Worker) -> Failure | None:
    """The failure of a process on another machine, as a process here has printed it."""
    stderr = worker.output.stderr_end()
    found = re.search(
        r"process \d+ on \S+ (?:ended too early|failed first, with exit code "
        rf"(?!{ExitCode.ANOTHER_FAILED})(\d+))",
        stderr,
    )
    if worker.code != ExitCode.ANOTHER_FAILED or found is None:
        return None
    return Failure(int(found[1] or ExitCode.DATA), f"{found[0]}.", worker.seconds, stderr)


def lost_processes(output: str) -> str | None:
    """Names the processes that JAX reports as lost; None if it reports none."""
    silent = _SILENT.search(output)
    if silent is not None:
        numbers = sorted(silent[1].split(), key=int)
        return f"process{'es' * (len(numbers) > 1)} {', '.join(numbers)}"
    return "process 0" if _COORDINATOR.search(output) else None
