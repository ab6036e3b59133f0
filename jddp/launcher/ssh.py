"""One launcher on each of many hosts, started through ssh.

    python -m jddp.launch --hosts a,b --num-processes 4 -m jddp.train

starts on host number R, in the same directory, by the same Python and with the same variables,

    python -m jddp.launch --num-nodes 2 --node-rank R --obey-input --coordinator a:PORT
        --hosts a,b --num-processes 4 -m jddp.train

ssh forwards no signals, and leaves its commands running. So the launchers started here read their
standard input: a line is the name of a signal, or empty as a sign of life. When the input ends, or
nothing arrives for `SILENCE_SECONDS`, the first launcher or the connection to it is lost: then the
job saves and ends.
"""

import contextlib
import math
import os
import secrets
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jddp.distributed.identity import FIRST_PORT, JOB, NUM_PORTS
from jddp.distributed.signals import SAME_SECONDS, stop_signals_go_to
from jddp.errors import CoordinatorError, ExitCode, UsageError, report
from jddp.launcher.group import POLL_SECONDS, Group, Worker

# Variables that you would export on each host by hand. For others ssh has SendEnv and SetEnv.
FORWARDED: tuple[str, ...] = ("CUDA_", "GLOO_", "JAX_", "JDDP_", "NCCL_", "OMP_", "TF_", "UCX_")
FORWARDED += ("XLA_", "LD_LIBRARY_PATH", "PYTHON", "XDG_CACHE_HOME")
SILENCE_SECONDS = 45.0
# Never prompt for a password; end when the other end has been silent as long.
_OPTIONS = ("-T", "-oBatchMode=yes", "-oServerAliveInterval=15", "-oServerAliveCountMax=3")
LOST = 255  # the exit code of ssh's own failures
_CONSEQUENCES = (ExitCode.ANOTHER_FAILED, 128 + signal.SIGABRT)
_BEAT_SECONDS = 5.0
_AGAIN_SECONDS = 10.0  # until a host that was lost is retried
_MOMENT = 3.0  # seconds in which the others fail too, for the same reason


def parse_hosts(text: str) -> tuple[str, ...]:
    """Names of hosts for ssh, from a list with commas.

    Raises:
      UsageError: If a name is empty or repeated.
    """
    hosts = tuple(host.strip() for host in text.split(","))
    names = [host.rpartition("@")[2] for host in hosts]
    if not all(names) or any(host.startswith("-") for host in hosts):
        raise UsageError(f"--hosts {text!r} must be names between commas, such as a,b or me@a,b.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"--hosts {text!r} names {', '.join(twice)} twice: each is one node.")
    return hosts


def choose_coordinator(host: str) -> str:
    """host:port at which launchers connect: the name from ssh's config, and a random port.

    Raises:
      CoordinatorError: If ssh rejects the name.
      UsageError: If ssh is not installed.
    """
    try:
        done = subprocess.run(["ssh", "-G", "--", host], capture_output=True, text=True)
    except FileNotFoundError:
        raise UsageError(
            "--hosts needs ssh, which is not installed. Without it run the same command on each "
            "host, with --num-nodes, --node-rank and --coordinator."
        ) from None
    settings = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    if "hostname" not in settings:
        raise CoordinatorError(f"ssh rejects {host!r}: {done.stderr.strip()}")
    name = settings["hostname"]
    port = FIRST_PORT + secrets.randbelow(NUM_PORTS)
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def command_on_host(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """The shell command that launches with these arguments on a host."""
    forwarded = {name: environ[name] for name in environ if name.startswith(FORWARDED)}
    variables = [f"{name}={value}" for name, value in sorted(forwarded.items())]
    command = ["env", *variables, sys.executable, "-m", "jddp.launch", *arguments]
    return f"{shlex.join(['cd', os.getcwd()])} && exec {shlex.join(command)}"


def launch_on(
    hosts: Sequence[str], arguments: Sequence[str], grace_seconds: float, *, may_lose: bool
) -> int:
    """Launches on each host, to the end of all; returns the exit code of the first failure, or 0.

    Args:
      hosts: Names for ssh.
      arguments: Arguments of each launcher, without the number of its node.
      grace_seconds: Time from SIGTERM until processes are killed.
      may_lose: Whether only the first host is required: the others are retried.

    Raises:
      CoordinatorError: If ssh cannot reach a required host, or has lost it.
    """
    environ = {JOB: secrets.token_hex(8), **os.environ}
    launchers = _Launchers(grace_seconds, may_lose=may_lose)
    for rank, host in enumerate(hosts):
        node = ["--num-nodes", str(len(hosts)), "--node-rank", str(rank), "--obey-input"]
        command = command_on_host([*node, *arguments], environ)
        launchers.start(host, ["ssh", *_OPTIONS, "--", host, command])
    with stop_signals_go_to(launchers.take_signal), contextlib.closing(launchers):
        return launchers.watch()


class _Launchers(Group):
    """The launchers on all hosts."""

    def __init__(self, grace_seconds: float, *, may_lose: bool):
        super().__init__()
        self._grace_seconds, self._may_lose = grace_seconds, may_lose
        self._signals: list[int] = []
        self._num_forwarded = 0
        self._next_beat = 0.0

    def start(self, host: str, command: Sequence[str]) -> None:
        """Starts ssh to a host, which has the logs of its processes."""
        no_log = Path(os.devnull)
        self.running.append(Worker(host, command, "", no_log, stdin=subprocess.PIPE))

    def take_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)

    def watch(self) -> int:
        """Waits for all; when one has failed, the others are ended."""
        self._first, failed = self.running[0], None
        while self.running and not failed:
            self.poll()
            time.sleep(POLL_SECONDS)
            decisive = self.ended
            if self._may_lose:
                decisive = [x for x in self.ended if x is self._first]
                self._retry()
            failed = next((x for x in decisive if x.code), None)
            if self._may_lose and decisive:
                break
        in_order = self._signals or (failed and failed.code == ExitCode.PREEMPTED)
        # Each launcher has its own limit for the time of saving.
        for seconds in [math.inf] if in_order else [_MOMENT, self._grace_seconds]:
            if not self.wait(seconds):
                self._send(signal.SIGTERM.name)
        self.wait(self._grace_seconds + _MOMENT)
        return self._code()

    def poll(self) -> list[Worker]:
        """Forwards signals, sends a sign of life, and records the launchers that have ended."""
        for number in self._signals[self._num_forwarded :]:
            self._send(signal.Signals(number).name)
            self._num_forwarded += 1
        if time.monotonic() > self._next_beat:
            self._next_beat = time.monotonic() + _BEAT_SECONDS
            self._send("")
        return super().poll()

    def close(self) -> None:
        """Ends all ssh processes."""
        for launcher in [*self.running, *self.ended]:
            _close(launcher)

    def _code(self) -> int:
        """Exit code of the first failure that is not the consequence of another."""
        failed = [x for x in self.ended if x.code]
        if self._may_lose and self._first.code not in _CONSEQUENCES:
            failed = [x for x in failed if x is self._first]
        if not failed:
            return 1 if self.running else 0
        first = min(failed, key=lambda x: x.code in _CONSEQUENCES)
        code = first.process.returncode
        if code == LOST or code < 0:
            first.output.close()
            reason = first.output.stderr_end().strip().rpartition("\n")[2]
            raise CoordinatorError(
                f"ssh cannot reach {first.name}, or has lost it: {reason or code} "
                f"(ssh -o BatchMode=yes {first.name} true)"
            )
        if code != ExitCode.PREEMPTED:
            report(f"the launcher on {first.name} ended first, with exit code {code}")
        return code

    def _retry(self) -> None:
        """Launches again on hosts that ssh lost some time ago."""
        for lost in [x for x in self.ended if x.code == LOST]:
            if lost is not self._first and time.monotonic() > lost.ended + _AGAIN_SECONDS:
                report(f"trying {lost.name} again")
                self.ended.remove(lost)
                _close(lost)
                self.start(lost.name, lost.command)

    def _send(self, line: str) -> None:
        for launcher in self.running:
            assert launcher.process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended
                launcher.process.stdin.write(f"{line}\n".encode())


def _close(launcher: Worker) -> None:
    launcher.process.kill()
    launcher.process.wait()
    launcher.output.close()
    assert launcher.process.stdin is not None
    launcher.process.stdin.close()


def obey_input(grace_seconds: float, silence_seconds: float = SILENCE_SECONDS) -> None:
    """Starts to take signals from standard input, and to end this process with it."""
    arguments = (grace_seconds, silence_seconds)
    threading.Thread(target=_obey, args=arguments, daemon=True).start()


def _obey(grace_seconds: float, silence_seconds: float) -> None:
    rest = b""
    while select.select([0], [], [], silence_seconds)[0] and (chunk := os.read(0, 4096)):
        *names, rest = (rest + chunk).split(b"\n")
        for name in filter(None, names):
            os.kill(os.getpid(), signal.Signals[name.decode()])
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # an error of writing there would prevent the checkpoint
        os.dup2(null, stream)
    for _ in range(2):  # to save first, then at once
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(max(grace_seconds, SAME_SECONDS + _MOMENT))
