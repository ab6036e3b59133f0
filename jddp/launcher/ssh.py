"""One launcher on each of many hosts, started through ssh.

    python -m jddp.launch --hosts a,b --num-processes 4 -m jddp.train

starts on host number R, in the same directory, by the same Python and with the same variables,

    python -m jddp.launch --num-nodes 2 --node-rank R --obey-input --coordinator a:PORT
        --num-processes 4 -m jddp.train

ssh hands on no signal, and leaves running what it has started. So whoever was started here listens
to its standard input: a line is the name of a signal, or empty, which says that somebody is there.
When the input ends, or nothing comes for `SILENCE_SECONDS`, the first launcher has gone, or the way
to it: then the job saves and ends.
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
from typing import Any

from jddp.distributed.identity import FIRST_PORT, JOB, NUM_PORTS
from jddp.distributed.signals import SAME_SECONDS, stop_signals
from jddp.errors import CoordinatorError, ExitCode, UsageError
from jddp.launcher.output import Output

# What one would export on each host by hand. More of them is ssh's business: SendEnv, SetEnv.
HANDED_ON: tuple[str, ...] = ("CUDA_", "GLOO_", "JAX_", "JDDP_", "NCCL_", "OMP_", "TF_", "UCX_")
HANDED_ON += ("XLA_", "LD_LIBRARY_PATH", "PYTHON", "XDG_CACHE_HOME")
SILENCE_SECONDS = 45.0
# Never ask, for nobody would answer; end when the other end has been silent as long.
_OPTIONS = ("-T", "-oBatchMode=yes", "-oServerAliveInterval=15", "-oServerAliveCountMax=3")
LOST = 255  # which ssh says where it has failed itself
_CONSEQUENCES = (ExitCode.ANOTHER_FAILED, 128 + signal.SIGABRT)
_BEAT_SECONDS = 5.0
_POLL_SECONDS = 0.02
_AGAIN_SECONDS = 10.0  # until a host that was lost is tried again
_MOMENT = 3.0  # seconds in which the others fail too, for the same reason


def parse_hosts(text: str) -> tuple[str, ...]:
    """Names between commas, as ssh takes them.

    Raises:
      UsageError: If one is empty, or stands twice.
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
    """Where launchers meet: on this host, as ssh's config calls it, at a port by chance.

    Raises:
      CoordinatorError: If ssh does not take the name.
    """
    asked = _ssh("-G", "--", host)
    told = dict(line.partition(" ")[::2] for line in asked.stdout.splitlines())
    if "hostname" not in told:
        raise CoordinatorError(f"ssh does not take {host!r}: {asked.stderr.strip()}")
    name = told["hostname"]
    port = FIRST_PORT + secrets.randbelow(NUM_PORTS)
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def command_on_host(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """What a shell on a host is to run, to launch with these arguments."""
    handed_on = {name: environ[name] for name in environ if name.startswith(HANDED_ON)}
    variables = [f"{name}={value}" for name, value in sorted(handed_on.items())]
    command = ["env", *variables, sys.executable, "-m", "jddp.launch", *arguments]
    return f"{shlex.join(['cd', os.getcwd()])} && exec {shlex.join(command)}"


def launch_on(
    hosts: Sequence[str], arguments: Sequence[str], grace_seconds: float, *, may_lose: bool
) -> int:
    """Launches on each host, to the end of all; returns the exit code of the first failure, or 0.

    Args:
      hosts: As ssh takes them.
      arguments: For the launcher on each, but for its place among them.
      grace_seconds: From asking to end until what runs is killed.
      may_lose: Whether only the first has to stay: the others are tried again and again.

    Raises:
      CoordinatorError: If ssh does not reach a host that it needs, or no more.
    """
    environ = {JOB: secrets.token_hex(8), **os.environ}
    commands = []
    for rank in range(len(hosts)):
        node = ["--num-nodes", str(len(hosts)), "--node-rank", str(rank), "--obey-input"]
        commands.append(command_on_host([*node, *arguments], environ))
    started = _Launchers(hosts, commands, grace_seconds, may_lose=may_lose)
    before: dict[int, Any] = {x: signal.signal(x, started.take_signal) for x in stop_signals()}
    try:
        return started.watch()
    finally:
        started.close()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Launcher:
    """On one host."""

    def __init__(self, host: str, command: str):
        self.host, self.command = host, command
        self.ended = 0.0  # when
        self.process = subprocess.Popen(
            ["ssh", *_OPTIONS, "--", host, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # so that Ctrl-C in a terminal does not reach it
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        # The host keeps what its processes say, each in a file.
        self.output = Output("", Path(os.devnull), (self.process.stdout, self.process.stderr))

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has gone
            self.process.stdin.write(f"{word}\n".encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.output.close()
        assert self.process.stdin is not None
        self.process.stdin.close()


class _Launchers:
    """On all hosts."""

    def __init__(
        self, hosts: Sequence[str], commands: Sequence[str], grace_seconds: float, *, may_lose: bool
    ):
        self._grace_seconds, self._may_lose = grace_seconds, may_lose
        self._signals: list[int] = []
        self._num_told = 0
        self._next_beat = 0.0
        self._running = [_Launcher(*both) for both in zip(hosts, commands, strict=True)]
        self._first = self._running[0]
        self._ended: list[_Launcher] = []  # in their order

    def take_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)

    def watch(self) -> int:
        """Waits for all; those that remain when one has failed are ended."""
        failed = None
        while self._running and not failed:
            self._look()
            decisive = self._ended
            if self._may_lose:
                decisive = [x for x in self._ended if x is self._first]
                self._try_again()
            failed = next((x for x in decisive if x.process.returncode), None)
            if self._may_lose and decisive:
                break
        in_order = self._signals or (failed and failed.process.returncode == ExitCode.PREEMPTED)
        # They know themselves how long saving may take.
        for seconds in [math.inf] if in_order else [_MOMENT, self._grace_seconds]:
            if not self._wait(seconds):
                self._tell(signal.SIGTERM)
        self._wait(self._grace_seconds + _MOMENT)
        return self._code()

    def close(self) -> None:
        """Hangs up."""
        for launcher in [*self._running, *self._ended]:
            launcher.close()

    def _code(self) -> int:
        """Of the first failure that is nobody else's."""
        failed = [x for x in self._ended if x.process.returncode]
        if self._may_lose and self._first.process.returncode not in _CONSEQUENCES:
            failed = [x for x in failed if x is self._first]
        if not failed:
            return 1 if self._running else 0
        first = min(failed, key=lambda x: x.process.returncode in _CONSEQUENCES)
        code = first.process.returncode
        if code == LOST or code < 0:
            first.output.close()
            words = first.output.last_words().strip().rpartition("\n")[2]
            raise CoordinatorError(
                f"ssh does not reach {first.host}, or no more: {words or code} "
                f"(ssh -o BatchMode=yes {first.host} true)"
            )
        if code != ExitCode.PREEMPTED:
            told = f"the launcher on {first.host} ended first, with exit code {code}"
            print(f"jddp: {told}", file=sys.stderr)
        return code

    def _wait(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self._running and time.monotonic() < until:
            self._look()
        return not self._running

    def _look(self) -> None:
        """Hands on what has come, says that somebody is here, and sees who has ended."""
        for number in self._signals[self._num_told :]:
            self._tell(number)
            self._num_told += 1
        if time.monotonic() > self._next_beat:
            self._next_beat = time.monotonic() + _BEAT_SECONDS
            for launcher in self._running:
                launcher.tell("")
        ended = [x for x in self._running if x.process.poll() is not None]
        for launcher in ended:
            launcher.ended = time.monotonic()
        self._ended += ended
        self._running = [x for x in self._running if x not in ended]
        time.sleep(_POLL_SECONDS)

    def _try_again(self) -> None:
        """Launches again where ssh has lost a host some time ago."""
        for lost in [x for x in self._ended if x.process.returncode == LOST]:
            if lost is not self._first and time.monotonic() > lost.ended + _AGAIN_SECONDS:
                print(f"jddp: trying {lost.host} again", file=sys.stderr, flush=True)
                self._ended.remove(lost)
                lost.close()
                self._running.append(_Launcher(lost.host, lost.command))

    def _tell(self, number: int) -> None:
        for launcher in self._running:
            launcher.tell(signal.Signals(number).name)


def obey_input(grace_seconds: float, silence_seconds: float = SILENCE_SECONDS) -> None:
    """Lets this process be signalled through its standard input, and end with it."""
    listens = threading.Thread(target=_obey, args=(grace_seconds, silence_seconds), daemon=True)
    listens.start()


def _obey(grace_seconds: float, silence_seconds: float) -> None:
    rest = b""
    while select.select([0], [], [], silence_seconds)[0] and (chunk := os.read(0, 4096)):
        *words, rest = (rest + chunk).split(b"\n")
        for word in filter(None, words):
            os.kill(os.getpid(), signal.Signals[word.decode()])
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # to write there would be an error, instead of a checkpoint
        os.dup2(nowhere, stream)
    for _ in range(2):  # in good order; at once
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(max(grace_seconds, SAME_SECONDS + _MOMENT))


def _ssh(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["ssh", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise UsageError(
            "--hosts needs ssh, and there is none. Without it the same command runs on each host, "
            "with --num-nodes, --node-rank and --coordinator."
        ) from None
