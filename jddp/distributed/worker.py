"""A process of a job: a program that is started, or a fork of one before its devices start.

    worker = Worker(number, command, log, may_fork=True)
    worker.begin(environ)       # again for the next attempt, when it has ended
    worker.close()

A thread reads both streams of a process, so that no process waits for a full pipe. Its output goes
into a file, and line by line to the terminal. Output that cannot be written, to a full disk or a
closed terminal, is dropped; a full disk is reported.

The imports of a process and its config take seconds, in which a restarted job would wait. So a
process of jddp.train, when it has done both and has started no device, forks a spare, which waits
(`fork_spare`). After a failure the launcher sends the spare the environment variables of the next
attempt. The spare forks the worker, answers with its number, waits for its end, and sends its exit
code. The worker has the streams of the process that was started. The spare ends with the launcher,
even if that was killed. Other programs do not read the variable SPARE, and are started again.
"""

import collections
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

from jddp.distributed.exits import exit_now, process
from jddp.ground.errors import ExitCode, report, words_of

SPARE = "JDDP_SPARE"  # Numbers of the open file by which a spare is asked, and of its launcher.
POLL_SECONDS = 0.02
NUM_LINES = 200  # Lines of standard error that are kept.
_SHOWN = 20  # Lines that are shown if there is no traceback.
_LONGEST = 2**16  # Bytes in a pipe of Linux; a longer line is shown in parts.
_READ_SECONDS = 2.0  # Limit for reading the rest of its output.
_FORK_SECONDS = 20.0  # Limit for a spare to answer.
_SHOWN_NAME = Path("/proc/self/comm")  # The name of this process that `top` shows.
CONSOLE = threading.Lock()  # Held while lines that belong together are printed.
# gloo, JAX's transport on CPUs, prints lines for each of its connections and cannot be silenced.
# Threads of several devices write the parts of their lines at once, so a line may lack any part.
_OF_GLOO = re.compile(
    rb"\[Gloo\] Rank | is connected to \d| peer ranks\. |number of connected peer ranks is : "
)
_NUMBERS = re.compile(rb"[\d\s]*")


def without_gloo(lines: list[bytes]) -> list[bytes]:
    """Drops the lines of gloo and, if there are any, the lines with nothing but a rank."""
    others = [line for line in lines if not _OF_GLOO.search(line)]
    if len(others) == len(lines):
        return lines
    return [line for line in others if not _NUMBERS.fullmatch(line)]


class Worker:
    """The process of one number in each attempt. Its output goes to the terminal, and to a file.

    Args:
      number: Number of the process in the job.
      command: Arguments of Python.
      log: File to whose end its output goes.
      may_fork: Whether the processes of later attempts may be forks of the first one.

    Attributes:
      number: Number of the process in the job.
      log: File for its output.
      pid: Number of the process on this machine.
      returncode: Its exit code, or minus the number of a signal; None while it runs.
    """

    returncode: int | None

    def __init__(self, number: int, command: Sequence[str], log: Path, *, may_fork: bool) -> None:
        self.number, self.log = number, log
        self._command = [sys.executable, *command]
        self._may_fork = may_fork and sys.platform == "linux"
        self._environ: dict[str, str] = {}
        self._control = socket.socket()  # Leads nowhere; later to the spare.
        self._errors: collections.deque[str] = collections.deque(maxlen=NUM_LINES)
        self._copying = threading.Lock()  # Held while output that was read is not yet copied.

    def begin(self, environ: dict[str, str]) -> None:
        """Starts the process of an attempt with these environment variables, or lets it be forked.

        Raises:
          OSError: If it cannot be started.
        """
        self._errors.clear()
        try:
            self._fork(environ)
        except (OSError, ValueError):  # There is no spare, or no answer.
            self._start(environ)
        self.returncode = None

    def poll(self) -> int | None:
        """Returns the exit code of the process; None while it runs."""
        if self.returncode is None and not self._is_forked:
            self.returncode = self._program.poll()
        elif self.returncode is None and wait([self._control], 0):
            self.returncode = int(self._control.recv(_LONGEST) or -signal.SIGKILL)
        return self.returncode

    def close(self) -> None:
        """Ends the spare, when the process has ended."""
        self._control.close()

    def _start(self, environ: dict[str, str]) -> None:
        self.close()
        self._environ, self._is_forked = environ, False
        self._control, given = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {SPARE: f"{given.fileno()} {os.getpid()}"} if self._may_fork else {}
        with given:
            self._program = program = subprocess.Popen(
                self._command,
                env=environ | own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=[given.fileno()] if own else [],
            )
        self.pid = program.pid
        self._sinks: dict[Any, Any] = {program.stdout: sys.stdout, program.stderr: sys.stderr}
        self._rests = dict.fromkeys(self._sinks.values(), b"")
        streams = self._sinks, self.log.open("ab", buffering=0)
        threading.Thread(target=self._copy, args=streams, daemon=True).start()

    def _fork(self, environ: dict[str, str]) -> None:
        """Lets the spare fork the process; raises an OSError or a ValueError if that fails."""
        changed = dict(environ.items() - self._environ.items())
        self._control.settimeout(_FORK_SECONDS)
        self._control.sendall(json.dumps(changed).encode())
        self.pid, self._is_forked = int(self._control.recv(_LONGEST)), True

    def read_out(self) -> None:
        """Reads all output that was written by now, for two seconds; streams may stay open."""
        until = time.monotonic() + _READ_SECONDS
        while self._is_behind() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        with self._copying:
            for sink, rest in self._rests.items():
                self._rests[sink] = self._show(rest + b"\n", sink) if rest else b""

    def _is_behind(self) -> bool:
        with self._copying:
            return bool(wait([*self._sinks], 0))

    def stderr_end(self) -> str:
        """The end of its standard error: from the last traceback on, if there is one."""
        lines = list(self._errors)
        starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent")]
        return "\n".join(lines[starts[-1] :] if starts else lines[-_SHOWN:])

    def _copy(self, sinks: dict[Any, Any], file: IO[bytes]) -> None:
        """Copies both streams to their ends, with lines before an error before that error."""
        while sinks:
            ready = wait([*sinks])
            with self._copying:
                for stream, sink in [(x, sink) for x, sink in sinks.items() if x in ready]:
                    chunk = os.read(stream.fileno(), _LONGEST)
                    self._keep(chunk, file)
                    self._rests[sink] = self._show(self._rests[sink] + chunk, sink)
                    if not chunk:
                        del sinks[stream]
                        stream.close()
        file.close()

    def _keep(self, chunk: bytes, file: IO[bytes]) -> None:
        try:
            if not file.closed:
                file.write(chunk)
        except OSError as error:
            file.close()
            with CONSOLE, suppress(OSError):
                report(f"{self.log}: {words_of(error)}. The rest is only in the terminal.")

    def _show(self, text: bytes, sink: Any) -> bytes:
        """Shows the lines of a text; returns the beginning of one at its end."""
        *lines, rest = re.split(rb"(?<=[\r\n])", text)
        if len(rest) > _LONGEST:
            lines = [*lines, rest + b"\n"]
            rest = b""
        if sink is sys.stderr:
            self._errors.extend(line.decode(errors="replace").rstrip() for line in lines)
        shown = b"".join(b"[%d] " % self.number + line for line in without_gloo(lines))
        with CONSOLE, suppress(OSError, ValueError):
            if hasattr(sink, "buffer"):
                sink.buffer.write(shown)
            else:  # The stream of a notebook.
                sink.write(shown.decode(errors="replace"))
            sink.flush()
        return rest


def fork_spare() -> bool:
    """Forks the spare of this process, if the launcher asks for one; returns in its workers, too.

    Returns:
      Whether the spare has forked this process.
    """
    descriptor, launcher = os.environ.pop(SPARE, "0 0").split()
    if int(launcher) != os.getppid():  # The variable may be inherited, the open file is not.
        return False
    with socket.socket(fileno=int(descriptor)) as control:
        if os.fork():
            return False
        os.setsid()
        _SHOWN_NAME.write_text("jddp-spare")
        with suppress(OSError):  # The launcher was killed.
            while changed := control.recv(_LONGEST):
                if (pid := os.fork()) == 0:
                    os.setsid()
                    _SHOWN_NAME.write_text("jddp-worker")
                    control.sendall(str(os.getpid()).encode())
                    os.environ.update(json.loads(changed))
                    process.forked_at = time.monotonic()
                    return True
                _, status = os.waitpid(pid, 0)
                control.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        exit_now(ExitCode.DONE)
