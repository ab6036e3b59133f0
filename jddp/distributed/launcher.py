"""Launches a program as the processes of a job, and restarts all of them if that may help.

When one process fails, all are ended, and all are restarted with the same command: a job of jddp
resumes from its last checkpoint. A job is not restarted after a failure that would repeat: a
mistake in config, code or data, numbers that are not finite, and the same message twice in a row
within a minute. Nor is a job that a signal has stopped.

If a job may run on fewer processes, the others resume without a machine that has left without a
failure. When a machine connects again, all stop and restart with it.
"""

import signal
import time
from collections.abc import Callable
from contextlib import closing

from jddp.distributed.failure_file import write_failure
from jddp.distributed.group import POLL_SECONDS, Group, Launch
from jddp.distributed.nodes import Nodes
from jddp.distributed.outcome import (
    CONSEQUENCES,
    DETERMINISTIC,
    SOON,
    Failure,
    first_failure,
    kill_overdue,
)
from jddp.distributed.output import CONSOLE
from jddp.distributed.signals import Signals
from jddp.ground.errors import CoordinatorError, ExitCode, report

_MOMENT = 2.0  # seconds in which others fail too, and processes of jddp end by themselves
_SAVE_SECONDS = 600.0  # which the others may need to save, where one was stopped by a signal
# Seconds from a failure to the restart, if all have ended by then. They double with each restart,
# until an attempt lasts a minute.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


def supervise(run: Callable[[Signals], Failure | None]) -> int:
    """Runs processes to their end; returns the exit code of the first failure, or 0.

    Args:
      run: Function that starts all processes, passes the stop signals of the launcher on as they
        are received, restarts all where that may help, and returns the first failure of the last
        attempt once it is reported; None if there is none.
    """
    signals = Signals()
    with signals.received():
        failure = run(signals)
    if failure is None:
        return ExitCode.DONE
    write_failure(failure.data)  # for the program that has started this launcher
    return failure.code


class NodeRunner:
    """Runs the processes of a launch that are on this machine, together with other machines.

    Args:
      launch: Command and number of processes.
    """

    def __init__(self, launch: Launch):
        self._launch = launch
        self._num_restarts = self._num_hasty = 0  # the second: in a row, each after a short attempt

    def run(self, signals: Signals) -> Failure | None:
        """Starts, watches and restarts the processes, for `supervise`.

        Raises:
          CoordinatorError: If other machines are missing.
          ProcessMismatchError: If other machines were started with different numbers.
          SystemExit: If a signal comes while it waits for them.
        """
        self._signals = signals
        self._nodes = Nodes(self._launch)
        has_failed = True
        try:
            failure = self._run()
            has_failed = failure is not None and failure.code != ExitCode.PREEMPTED
            return failure
        finally:
            self._nodes.close(failed=has_failed)

    def _run(self) -> Failure | None:
        failure: Failure | None = None
        last: Failure | None = None
        try:
            while (failure := self._attempt()) and self._restarts(failure, last):
                last = failure
        except CoordinatorError as error:
            if failure is None:
                raise
            report(f"not restarted: {error}")
        return failure

    def _has_changed(self, failure: Failure) -> bool:
        """Whether all have stopped only because a machine has left or has connected."""
        in_order = self._launch.min_processes is not None and failure.code == ExitCode.PREEMPTED
        return (in_order or self._makes_room) and not self._signals.numbers

    def _restarts(self, failure: Failure, last: Failure | None) -> bool:
        """Whether all are restarted, after a pause without a signal; prints the decision."""
        if failure.seconds > SOON:
            self._num_hasty = 0
        if self._has_changed(failure):
            report("restarting with the machines that are connected")
            return True
        if not (most := self._launch.max_restarts):
            return False
        by = "".join(signal.Signals(number).name for number in self._signals.numbers[:1])
        reasons = {
            f"{by} has stopped the job": by,
            "it was stopped by a signal, and is saved": failure.code == ExitCode.PREEMPTED,
            f"exit code {failure.code} would repeat": failure.code in DETERMINISTIC,
            "the same failure twice, each within a minute": failure.repeats(last),
            f"restarts allowed: {most}": self._num_restarts == most,
        }
        if held := [reason for reason, holds in reasons.items() if holds]:
            report(f"not restarted: {held[0]}")
            return False
        until = self._ended + min(_FIRST_PAUSE * 2**self._num_hasty, _LONGEST_PAUSE)
        self._num_restarts += 1
        self._num_hasty += 1
        seconds = round(max(0.0, until - time.monotonic()))
        report(f"restart {self._num_restarts} of {most} {f'in {seconds} s' if seconds else 'now'}")
        while not self._signals.numbers and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        return not self._signals.numbers

    def _attempt(self) -> Failure | None:
        """Waits for the other machines, then for the first failure, and ends the group."""
        with self._signals.exiting():
            place = self._nodes.gather()
        with closing(Group(self._launch, place)) as group:
            numbers = " and ".join(", ".join(str(x.number) for x in group.running).rsplit(", ", 1))
            started = f"starting process {numbers} of {place.num_processes} on this machine"
            report(f"{started}; logs in {self._launch.logs}")
            self._watch(group)
            self._ended = time.monotonic()
            if group.is_overdue and not group.failed():
                return self._report(kill_overdue(group, self._signals.numbers[0]))
            self._wait_for_cause(group)
            failure = self._first_failure(group)
            in_order = {worker.returncode for worker in group.failed()} == {ExitCode.PREEMPTED}
            if in_order or self._signals.numbers or self._makes_room:
                group.wait(
                    _SAVE_SECONDS,
                    lambda: group.forward(self._signals.numbers) > 1 or group.is_overdue,
                )
            if not group.is_overdue:
                group.close(moment_seconds=_MOMENT, grace_seconds=self._launch.grace_seconds)
            group.close()
            return failure or self._first_failure(group)

    def _watch(self, group: Group) -> None:
        """Waits until a process or a machine has failed, or the group is to end."""
        self._makes_room = False  # stops all, to restart with a machine that has connected
        while not group.wait(POLL_SECONDS) and not group.failed():
            num_signals = group.forward(self._signals.numbers)
            lost = self._nodes.lost(group.failure_file)
            if num_signals > 1 or lost or group.is_overdue:
                break
            if not self._makes_room and self._nodes.has_newcomer():
                self._makes_room = True
                report("another machine has connected: stopping, to resume with it")
                group.signal(signal.SIGTERM)

    def _wait_for_cause(self, group: Group) -> None:
        """Waits a moment for the failure that has caused the failures of the processes here."""
        until = time.monotonic() + _MOMENT
        is_alone = self._launch.num_nodes == 1
        while not group.failure_file.exists() and time.monotonic() < until:
            lost = self._nodes.lost(group.failure_file)
            has_ended = group.wait(POLL_SECONDS)
            codes = {worker.returncode for worker in group.failed()}
            if codes - CONSEQUENCES or (has_ended and (lost or is_alone or not codes)):
                break

    def _first_failure(self, group: Group) -> Failure | None:
        """The first failure that is known by now; prints it."""
        failure = first_failure(group, self._nodes.lost(group.failure_file))
        return failure and self._report(failure)

    def _report(self, failure: Failure) -> Failure:
        self._nodes.send_failure(failure.data)
        if failure.code != ExitCode.PREEMPTED and not self._has_changed(failure):
            with CONSOLE:  # or lines of another process would come in between
                report(str(failure))
        return failure
