"""Launches a program as the processes of a job, and restarts all of them if that may help.

When one process fails, all are ended, and all are restarted with the same command: a job of jddp
resumes from its last checkpoint. A job is not restarted after a failure that would repeat: a
mistake in config, code or data, and numbers that are not finite. A job that a signal has stopped is
not restarted either.

The launchers of several machines agree, before each attempt, on the machines that take part. The
launcher of node 0 listens at the coordinator's port as long as it runs, and the others stay
connected to it. The processes that they start connect at another port above this one.
"""

import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from jddp.distributed import failure_file as failures
from jddp.distributed.group import Group, Launch, Place
from jddp.distributed.identity import JOB, LOOPBACK
from jddp.distributed.join import HEARTBEAT, START, bind_address, read_seconds
from jddp.distributed.rendezvous import Member, RendezvousClient, RendezvousServer, listen
from jddp.distributed.signals import Signals
from jddp.distributed.worker import CONSOLE, POLL_SECONDS, Worker
from jddp.ground.errors import CoordinatorError, ExitCode, report
from jddp.ground.typing import JsonObject

_MOMENT = 2.0  # Seconds for others to fail too, and for processes of jddp to end by themselves.
_SAVE_SECONDS = 600.0  # Limit for the others to save after a signal has stopped one process.
_PAUSE = 1.0  # Seconds between the starts of two attempts, at least.
# Failures that a restart with the same command repeats.
DETERMINISTIC = {ExitCode.USAGE, ExitCode.DATA, ExitCode.OUT_OF_MEMORY}
DETERMINISTIC |= {ExitCode.PROCESS_MISMATCH, ExitCode.NUMERICS}
# Ends that may only be the consequence of another process's end: jddp reports it, or JAX aborts.
_CONSEQUENCES = {ExitCode.ANOTHER_FAILED, -signal.SIGABRT}
_END_SECONDS = 10.0  # Limit for a process that has left its job to end.
_NUM_PORTS = 64  # Number of ports above the coordinator's port that are tried.


class Failure(NamedTuple):
    """The first failure of an attempt, as the launcher reports it.

    Attributes:
      data: The failure as data.
      headline: Process that failed, and its failure.
      text: Traceback, or the end of standard error.
    """

    data: JsonObject
    headline: str
    text: str = ""

    def __str__(self) -> str:
        """The headline, and below it the text."""
        return "\n    ".join([self.headline, *self.text.splitlines()])

    @property
    def code(self) -> int:
        """Exit code of the launcher."""
        return self.data["exit_code"] or ExitCode.DATA


def _first_failure(group: Group, lost: Sequence[int]) -> Failure | None:
    """The failure to report for an attempt; None if there is none. Nothing else decides it.

    It is the first of these that exists: the failure in the file, the first process here that has
    ended by itself, a lost machine, the first process that has ended.

    Args:
      group: The processes here.
      lost: Numbers of other machines that were lost.
    """
    failed = group.failed()
    seconds = time.monotonic() - group.began
    if not failed and not lost:
        return None
    by_themselves = [worker for worker in failed if worker.returncode not in _CONSEQUENCES]
    data = failures.read_failure(group.failure_file)
    if data is None and lost and not by_themselves:
        text = f"node {lost[0]} was lost."
        reason = {"type": "jddp.launch", "message": text}
        data = failures.describe_failure(None, ExitCode.ANOTHER_FAILED, host=None, exception=reason)
        with suppress(OSError), group.failure_file.open("x") as file:
            json.dump(data, file)  # Processes may wait for that machine.
        return Failure(data, text)
    if data is None:  # The process has written no failure.
        worker = [*by_themselves, *failed][0]
        data = failures.describe_failure(worker.number, worker.returncode)
        aborted = worker.returncode == -signal.SIGABRT
        if aborted and (silent := failures.ABORT.search(worker.stderr_end())):
            data["exit_code"] = ExitCode.ANOTHER_FAILED
            data["exception"] = {"type": "JAX", "message": " ".join(silent[0].split())}
        failures.write_failure(data, group.failure_file)
        data = failures.read_failure(group.failure_file) or data  # Another may have been faster.
    number = data["process"]
    if data["exit_code"] is None:  # A process has left its job: its end shows the code.
        group.wait(_END_SECONDS, lambda: all(worker.number != number for worker in group.running))
        for worker in group.ended:
            if worker.number == number:
                known = failures.describe_failure(number, worker.returncode)
                data["exit_code"] = known["exit_code"]
                with suppress(OSError):
                    group.failure_file.write_text(json.dumps(data, indent=2) + "\n")
    named = [worker for worker in group.failed() if worker.number == number]
    text = f"{failures.headline(data)} (after {seconds:.1f} s)."
    if named:
        text += f" Its whole output is in {named[0].log}."
    said = next((worker.stderr_end() for worker in (*named, *failed)), "")
    return Failure(data, text, ("" if named else data["traceback"]) or said)


def _kill_overdue(group: Group, number: int) -> Failure:
    """Kills the processes that have not ended after a signal to the launcher."""
    name = signal.Signals(number).name
    late = ", ".join(f"process {worker.number}" for worker in group.running)
    text = f"{name}: killed after --grace-seconds, because it had not ended: {late}."
    reason = {"type": "jddp.launch", "message": text}
    data = failures.describe_failure(group.running[0].number, 128 + number, exception=reason)
    group.close()
    failures.write_failure(data, group.failure_file)
    return Failure(data, text)


class Nodes:
    """This machine's connection to the others, if there are any.

    Args:
      launch: The launch of this machine.
      environ: The environment.

    Raises:
      CoordinatorError: If node 0 cannot listen at the coordinator's port.
    """

    def __init__(self, launch: Launch, environ: Mapping[str, str] = os.environ):
        self._launch = launch
        self._seconds = read_seconds(environ, START)
        self._same = {JOB: environ.get(JOB, "not set")}
        self._end: RendezvousServer | RendezvousClient | None = None
        if launch.coordinator is not None and launch.num_nodes > 1:
            address = launch.coordinator
            silence = read_seconds(environ, HEARTBEAT)
            if launch.node_rank == 0:
                listens = bind_address(address)
                self._end = RendezvousServer("node", address, listens, silence_seconds=silence)
            else:
                self._end = RendezvousClient("node", address, silence_seconds=silence)

    def gather(self) -> Place:
        """Waits for the other machines; returns the place of this one.

        Raises:
          CoordinatorError: If machines are missing after JDDP_START_SECONDS, or node 0 has left.
          ProcessMismatchError: If two machines have one rank, or different numbers or JDDP_JOB.
        """
        launch = self._launch
        info: JsonObject = {"processes": launch.num_processes}
        if launch.node_rank == 0:
            info |= {"coordinator": self._choose_port(), "job": secrets.token_hex(8)}
        infos: dict[int, JsonObject] = {0: info}
        if self._end is not None:
            mine = Member(launch.node_rank, launch.num_nodes, self._same, info)
            infos = self._end.gather(mine, seconds=self._seconds)
        num_processes = sum(info["processes"] for info in infos.values())
        first = sum(x["processes"] for rank, x in infos.items() if rank < launch.node_rank)
        return Place(infos[0]["coordinator"], num_processes, first, infos[0]["job"])

    def lost(self, failure_file: Path) -> list[int]:
        """Machines of this attempt that were lost; only node 0 is connected to all.

        Writes a failure that another machine has sent, if the file has none.
        """
        if self._end is None:
            return []
        lost = self._end.lost()
        if self._end.failure and not failure_file.exists():
            failures.write_failure(self._end.failure, failure_file)
        return lost

    def send_failure(self, failure: JsonObject) -> None:
        """Sends the others the failure of an attempt: they may wait for a process here."""
        if self._end is not None:
            self._end.tell(failure=failure)

    def close(self, *, failed: bool) -> None:
        """Leaves the job; after a failure, the attempt of the other machines ends too."""
        if self._end is not None:
            self._end.tell(failed=failed)
            self._end.close()

    def _choose_port(self) -> str:
        """host:port at which the processes connect: a port of node 0 that is free now."""
        host, _, port = (self._launch.coordinator or f"{LOOPBACK}:0").rpartition(":")
        above = range(int(port) + 1, min(int(port) + _NUM_PORTS, 2**16))
        *ports, last = above if self._launch.num_nodes > 1 else [int(port)]
        for number in ports:
            with suppress(CoordinatorError):
                return free_address(f"{host}:{number}")
        return free_address(f"{host}:{last}")


def free_address(address: str) -> str:
    """The address, with a free port for 0; raises a CoordinatorError if its port is taken."""
    with listen(bind_address(address)) as listening:
        return f"{address.rpartition(':')[0]}:{listening.getsockname()[1]}"


def supervise(run: Callable[[Signals], Failure | None]) -> int:
    """Runs processes to their end; returns the exit code of the first failure, or 0.

    Args:
      run: Function that starts all processes, receives the stop signals of the launcher and passes
        them on, and restarts all where that may help. It returns the first failure of the last
        attempt after reporting it; None if there is none.
    """
    try:
        failure = run(Signals())
    except KeyboardInterrupt:  # No process runs.
        return ExitCode.INTERRUPTED
    if failure is None:
        return ExitCode.DONE
    failures.write_failure(failure.data)  # The program that has started this launcher may read it.
    return failure.code


class NodeRunner:
    """Runs the processes of a launch that are on this machine, together with other machines.

    Args:
      launch: Command and number of processes.
    """

    def __init__(self, launch: Launch):
        self._launch = launch
        self._num_restarts = 0
        self._workers: dict[int, Worker] = {}

    def run(self, signals: Signals) -> Failure | None:
        """Starts, watches and restarts the processes, for `supervise`.

        Raises:
          CoordinatorError: If other machines are missing.
          ProcessMismatchError: If other machines were started with different numbers.
        """
        self._signals = signals
        self._nodes = Nodes(self._launch)
        failure: Failure | None = None
        has_failed = True
        try:
            while (failure := self._attempt()) and self._restarts(failure):
                pass
            has_failed = failure is not None and failure.code != ExitCode.PREEMPTED
        except CoordinatorError as error:
            if failure is None:
                raise
            report(f"not restarted: {error}")
        finally:
            for worker in self._workers.values():
                worker.close()
            self._nodes.close(failed=has_failed)
        return failure

    def _restarts(self, failure: Failure) -> bool:
        """Whether all are restarted, after a pause; prints the decision."""
        if not (most := self._launch.max_restarts):
            return False
        by = "".join(signal.Signals(number).name for number in self._signals.numbers[:1])
        reasons = {
            f"{by} has stopped the job": by,
            "it was stopped by a signal, and is saved": failure.code == ExitCode.PREEMPTED,
            f"exit code {failure.code} would repeat": failure.code in DETERMINISTIC,
            f"restarts allowed: {most}": self._num_restarts == most,
        }
        if held := [reason for reason, holds in reasons.items() if holds]:
            report(f"not restarted: {held[0]}")
            return False
        self._num_restarts += 1
        report(f"restart {self._num_restarts} of {most} now")
        time.sleep(max(0.0, self._began + _PAUSE - time.monotonic()))
        return True

    def _attempt(self) -> Failure | None:
        """Waits for the other machines, then for the first failure, and ends the group."""
        place = self._nodes.gather()
        with self._signals.received(), closing(Group(self._launch, place, self._workers)) as group:
            numbers = " and ".join(", ".join(str(x.number) for x in group.running).rsplit(", ", 1))
            started = f"starting process {numbers} of {place.num_processes} on this machine"
            report(f"{started}; logs in {self._launch.logs}")
            self._began = group.began
            self._watch(group)
            if group.is_overdue and not group.failed():
                return self._find_failure(group, _kill_overdue(group, self._signals.numbers[0]))
            self._wait_for_cause(group)
            failure = self._find_failure(group)
            in_order = {worker.returncode for worker in group.failed()} == {ExitCode.PREEMPTED}
            if in_order or self._signals.numbers:
                group.wait(
                    _SAVE_SECONDS,
                    lambda: group.forward(self._signals.numbers) > 1 or group.is_overdue,
                )
            if not group.is_overdue:
                group.close(moment_seconds=_MOMENT, grace_seconds=self._launch.grace_seconds)
            group.close()
            return failure or self._find_failure(group)

    def _watch(self, group: Group) -> None:
        """Waits until a process or a machine has failed, or the group is to end."""
        while not group.wait(POLL_SECONDS) and not group.failed():
            num_signals = group.forward(self._signals.numbers)
            lost = self._nodes.lost(group.failure_file)
            if num_signals > 1 or lost or group.is_overdue:
                break

    def _wait_for_cause(self, group: Group) -> None:
        """Waits a moment for the failure that has caused the failures of the processes here."""
        until = time.monotonic() + _MOMENT
        is_alone = self._launch.num_nodes == 1
        while not group.failure_file.exists() and time.monotonic() < until:
            lost = self._nodes.lost(group.failure_file)
            has_ended = group.wait(POLL_SECONDS)
            codes = {worker.returncode for worker in group.failed()}
            if codes - _CONSEQUENCES or (has_ended and (lost or is_alone or not codes)):
                break

    def _find_failure(self, group: Group, failure: Failure | None = None) -> Failure | None:
        """The failure given, or the first that is known by now; prints it."""
        failure = failure or _first_failure(group, self._nodes.lost(group.failure_file))
        if failure is not None:
            self._nodes.send_failure(failure.data)
            if failure.code != ExitCode.PREEMPTED:
                with CONSOLE:  # Lines of another process could come in between.
                    report(str(failure))
        return failure
