"""How an attempt ended: what went wrong first, and would it go wrong again?"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jddp.errors import ExitCode
from jddp.launcher.aborts import whom_jax_has_lost
from jddp.launcher.group import Worker

# A config, data, memory, a disagreement, numbers: the same again would end the same.
DETERMINISTIC = {ExitCode.USAGE, ExitCode.DATA, ExitCode.OUT_OF_MEMORY}
DETERMINISTIC |= {ExitCode.PROCESS_MISMATCH, ExitCode.NUMERICS}
# Ends that may only be the consequence of another's: said by jddp, or JAX's abort.
CONSEQUENCES = {ExitCode.ANOTHER_FAILED, -signal.SIGABRT}
SOON = 60.0  # seconds


@dataclass(frozen=True)
class Failure:
    """The first that went wrong in an attempt.

    Attributes:
      code: That the launcher returns; 128 and a signal's number for a signal.
      headline: Who failed, and how.
      seconds: That it ran.
      words: The end of its standard error.
    """

    code: int
    headline: str
    seconds: float = 0.0
    words: str = ""

    def repeats(self, other: "Failure | None") -> bool:
        """Whether this is what another attempt ended with, both times at once."""
        if other is None or max(self.seconds, other.seconds) > SOON or self.code > 128:
            return False
        return self.code == other.code and self._last_word() == other._last_word() != ""

    def _last_word(self) -> str:
        return self.words.rpartition("\n")[2]


def first_failure(failed: Sequence[Worker], lost: Sequence[int], logs: Path) -> Failure | None:
    """What is to be told of an attempt; None if it ended well.

    Args:
      failed: Processes here that have ended badly by themselves, the first one first.
      lost: Other machines that have gone without a word.
      logs: Folder of what processes have said.
    """
    if not failed and not lost:
        return None
    failures = [_describe(worker, logs) for worker in failed if worker.code not in CONSEQUENCES]
    failures += [told for worker in failed if (told := _told(worker))]
    failures += [
        Failure(ExitCode.ANOTHER_FAILED, f"node {node} has gone without a word.") for node in lost
    ]
    return [*failures, *(_describe(worker, logs) for worker in failed)][0]


def _describe(worker: Worker, logs: Path) -> Failure:
    code = worker.code or 0
    how = f"exit code {code}"
    if code < 0:
        how, code = f"signal {signal.Signals(-code).name}", 128 - code
        if how.endswith("SIGKILL"):
            how += " (if nobody sent it, the machine was out of memory)"
        lost = whom_jax_has_lost(worker.output.last_words())
        if how.endswith("SIGABRT") and lost is not None:
            how += f": JAX has lost {lost}, or the way there"
    log = logs / f"process_{worker.process_id}.log"
    what = "ended because another did" if worker.code in CONSEQUENCES else "failed first"
    headline = (
        f"process {worker.process_id} {what}, with {how}, after {worker.seconds:.1f} s. "
        f"Everything it said is in {log}."
    )
    return Failure(code, headline, worker.seconds, worker.output.last_words())


def _told(worker: Worker) -> Failure | None:
    """What a process of jddp has told of the one that failed first, on another machine."""
    words = worker.output.last_words()
    told = re.search(
        r"process \d+ on \S+ (?:ended too early|failed first, with exit code "
        rf"(?!{ExitCode.ANOTHER_FAILED})(\d+))",
        words,
    )
    if worker.code != ExitCode.ANOTHER_FAILED or told is None:
        return None
    return Failure(int(told[1] or ExitCode.DATA), f"{told[0]}.", worker.seconds, words)
