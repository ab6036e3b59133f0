"""Detects that a job makes no progress, and names the process that is behind.

A process that hangs looks healthy to JAX, because another thread sends its heartbeats, and all
others wait for it in a collective for ever. So each process watches itself: every phase has a time
limit. If a limit is exceeded, all processes write their stacks and publish their progress, and a
message names the process that is behind or does not answer. A process that the command line owns
then ends (`HANG`). Time in which this process did not run (SIGSTOP, Ctrl-Z, a paused virtual
machine) does not count.

    with Watchdog(Limits(), stacks=Path("logs/process_0.stacks")) as watchdog:
        watchdog.enter("step", 17)            # each step calls it again
"""

import contextlib
import faulthandler
import itertools
import json
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from jddp.distributed import coordination as service
from jddp.distributed import failure, failure_file
from jddp.distributed.apart import started_apart
from jddp.distributed.exits import process
from jddp.ground.errors import ExitCode
from jddp.ground.files import make_folder, opener
from jddp.ground.typing import JsonObject

_ANSWER_SECONDS = 5.0
_TICK = 0.5  # Seconds.
_openings = itertools.count()


@dataclass(frozen=True)
class Limits:
    """Time limits of the phases, in seconds; in an evaluation, of one batch.

    Attributes:
      start_seconds: Time to make the first state, and to read a checkpoint.
      compile_seconds: Time of the first step.
      step_seconds: Time of a later step; None means thirty times the longest step so far, and at
        least two minutes.
      evaluation_seconds: Time of one batch of an evaluation; the first includes compilation.
      save_seconds: Time that the loop waits for a checkpoint.
    """

    start_seconds: float = 1800.0
    compile_seconds: float = 3600.0
    step_seconds: float | None = None
    evaluation_seconds: float = 3600.0
    save_seconds: float = 3600.0

    def of(self, phase: str, longest_step: float) -> float:
        """Time limit of a phase, in seconds, given the longest step of the run so far."""
        limit = getattr(self, f"{phase}_seconds")
        return max(120.0, 30 * longest_step) if limit is None else float(limit)


class Watchdog:
    """Watches this process of a job, while it is open.

    Args:
      limits: Time limits of the phases.
      stacks: File for the stacks of all threads; None for standard error.

    Attributes:
      phase: The phase under way.
    """

    def __init__(self, limits: Limits, stacks: Path | None) -> None:
        self._limits = limits
        self._path = stacks
        self._key = f"jddp/hang/{next(_openings)}"
        self._ran = 0.0  # Seconds.
        self._ticked = time.monotonic()  # Time of the last count.
        self.phase = "start"
        self._step = 0
        self._since = 0.0
        self._longest_step = 0.0
        self._open = contextlib.ExitStack()
        self._file: TextIO = sys.stderr
        self._silence: IO[bytes] | None = None

    def enter(self, phase: str, step: int) -> None:
        """Records that a phase, or a step or batch in it, begins after `step` finished steps."""
        now = self._ran
        if phase == self.phase == "step":
            self._longest_step = max(self._longest_step, now - self._since)
        is_new = phase != self.phase
        self.phase = phase
        self._step = step
        self._since = now
        process.progress.update(step=step, phase=phase)
        # A thread that holds the interpreter's lock from now on prevents the next tick.
        if is_new:
            self._report_limit()

    def __enter__(self) -> "Watchdog":
        """Begins to watch. From here on a failure is kept next to the stacks."""
        self.enter(self.phase, 0)
        if self._path is not None:
            make_folder(self._path.parent)
            if service.process_index() == 0:
                failure_file.begin(self._path.parent)
            self._file = self._open.enter_context(open(self._path, "a", opener=opener))
        if process.is_owned:
            # A timer in this process would count a pause (SIGSTOP, Ctrl-Z) too.
            faulthandler.register(signal.SIGQUIT, self._file, chain=True)
            self._open.callback(faulthandler.unregister, signal.SIGQUIT)
            self._silence = self._open.enter_context(started_apart("silence", str(os.getpid())))
        self._open.enter_context(service.background(self._watch, pause_seconds=_TICK))
        if service.num_processes() > 1:
            self._open.enter_context(service.background(self._listen))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Ends watching."""
        if kind is None:
            failure_file.begin(None)
        self._open.close()
        with contextlib.suppress(OSError):  # The file may have been moved.
            if self._path is not None and self._path.stat().st_size == 0:
                self._path.unlink()

    @property
    def _limit(self) -> float:
        return self._limits.of(self.phase, self._longest_step)

    def _watch(self) -> bool:
        """Counts the time since the last call, unless the process was stopped in it."""
        now = time.monotonic()
        self._ran += min(now - self._ticked, 2 * _TICK)
        self._ticked = now
        self._report_limit()
        if self._ran - self._since <= self._limit:
            return False
        service.try_publish(self._key, "")
        return self._report()

    def _listen(self) -> bool:
        late = service.try_read(self._key, 1.0)
        return not service.is_connected() or (late is not None and self._report())

    def _report_limit(self) -> None:
        """Passes the allowed time of silence to the process that watches this one."""
        if self._silence is not None:
            with contextlib.suppress(OSError):  # The other process was killed.
                self._silence.write(b"%f\n" % (self._limit + 30))

    def _report(self) -> bool:
        """Writes the stacks, compares the progress of all, and ends the process if it may.

        If a process has left, it is no hang: the job ends because that process has left.
        """
        faulthandler.dump_traceback(self._file, all_threads=True)
        self._file.flush()
        if process.is_owned and failure.blame_who_left():
            return True
        own: JsonObject = {"host": socket.gethostname(), "phase": self.phase}
        own |= {"step": self._step, "seconds": self._ran - self._since}
        me = service.process_index()
        service.try_publish(f"{self._key}/{me}", json.dumps(own))
        progress: dict[int, JsonObject | None] = {me: own}
        for number in {*range(service.num_processes())} - {me}:
            text = service.try_read(f"{self._key}/{number}", _ANSWER_SECONDS)
            progress[number] = json.loads(text or "null")
        behind, message = describe_hang(progress, self._limits, self._longest_step)
        message += f" Stacks: {self._path or 'above'}."
        if process.is_owned:
            known = progress[behind] or {"host": failure.host_of(behind)}
            known = {"step": None, "phase": None, **known}
            failure.end_process(
                failure_file.describe_failure(behind, ExitCode.HANG, **known), message
            )
        logging.getLogger("jddp").error("%s", message)
        return True


def describe_hang(
    progress: dict[int, JsonObject | None], limits: Limits, longest_step: float
) -> tuple[int, str]:
    """Names the process that blocks the job: one that does not answer, or else the slowest.

    Args:
      progress: Host, phase, steps and seconds in the phase of each process; None for no answer.
      limits: Time limits of the phases.
      longest_step: Seconds of the longest step so far.

    Returns:
      The number of that process, and a paragraph about all processes.
    """
    known = {number: found for number, found in sorted(progress.items()) if found is not None}
    silent = [number for number in progress if number not in known]
    behind = min(known, key=lambda i: (known[i]["step"], -known[i]["seconds"]))
    x = known.pop(behind)
    unanswered = f"process {', '.join(map(str, silent))} does not answer; " if silent else ""
    headline = (
        f"no progress: {unanswered}process {behind} on {x['host']} is in phase {x['phase']} after "
        f"step {x['step']} for {x['seconds']:.0f} s; the limit is "
        f"{limits.of(x['phase'], longest_step):.0f} s."
    )
    line = "Process {}: {phase} after step {step}, for {seconds:.0f} s."
    others = [line.format(i, **found) for i, found in known.items()]
    return (silent or [behind])[0], " ".join([headline, *others])
