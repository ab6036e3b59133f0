"""The output of a group's processes: a file for each, and line by line in the terminal.

A thread reads both streams of a process, so that no process waits for a full pipe. Output that
cannot be written, to a full disk or a closed terminal, is dropped; a full disk is reported.
"""

import collections
import contextlib
import os
import re
import subprocess
import sys
import threading
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from jddp.ground.errors import report, words_of

NUM_LINES = 200  # of standard error that are kept
_SHOWN = 20  # of them, without a traceback
_LONGEST = 2**16  # bytes that Linux keeps in a pipe, and of a line before it is shown in parts
CONSOLE = threading.Lock()  # held while lines that belong together are printed
# gloo, JAX's transport on CPUs, prints lines for each of its connections and cannot be silenced.
# Threads of several devices write the parts of their lines at once, so a line may lack any part.
_OF_GLOO = re.compile(
    rb"\[Gloo\] Rank | is connected to \d| peer ranks\. |number of connected peer ranks is : "
)
_NUMBERS = re.compile(rb"[\d\s]*")


class Output:
    """The output of one process.

    Args:
      prefix: Beginning of each of its lines in the terminal.
      path: File to append to.
      process: The process, whose standard output and standard error are pipes.
    """

    def __init__(self, prefix: str, path: Path, process: subprocess.Popen[bytes]):
        self._prefix = prefix.encode()
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._errors: collections.deque[str] = collections.deque(maxlen=NUM_LINES)
        self._thread = threading.Thread(target=self._copy, args=[process], daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Reads to the end, unless another process holds a stream open for two more seconds."""
        self._thread.join(2.0)

    def stderr_end(self) -> str:
        """The end of its standard error: from the last traceback on, if there is one."""
        lines = list(self._errors)
        starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent")]
        return "\n".join(lines[starts[-1] :] if starts else lines[-_SHOWN:])

    def _copy(self, process: Any) -> None:
        """Copies both streams to their ends, with lines before an error before that error."""
        sinks = {process.stdout: sys.stdout, process.stderr: sys.stderr}
        rests = dict.fromkeys(sinks, b"")
        while sinks:
            ready = wait([*sinks])
            for stream in [stream for stream in sinks if stream in ready]:
                chunk = os.read(stream.fileno(), _LONGEST)
                self._keep(chunk)
                end = b"\n" if rests[stream] and not chunk else b""
                rests[stream] = self._show(rests[stream] + chunk + end, sinks[stream])
                if not chunk:
                    del sinks[stream]
                    stream.close()
        self._file.close()

    def _keep(self, chunk: bytes) -> None:
        try:
            if not self._file.closed:
                self._file.write(chunk)
        except OSError as error:
            self._file.close()
            with CONSOLE, contextlib.suppress(OSError):
                report(f"{self.path}: {words_of(error)}. The rest is only in the terminal.")

    def _show(self, text: bytes, sink: Any) -> bytes:
        """Shows the lines of a text; returns the beginning of one at its end."""
        *lines, rest = re.split(rb"(?<=[\r\n])", text)
        if len(rest) > _LONGEST:
            lines = [*lines, rest + b"\n"]
            rest = b""
        if sink is sys.stderr:
            self._errors.extend(line.decode(errors="replace").rstrip() for line in lines)
        shown = b"".join(self._prefix + line for line in without_gloo(lines))
        with CONSOLE, contextlib.suppress(OSError, ValueError):
            if hasattr(sink, "buffer"):
                sink.buffer.write(shown)
            else:  # a notebook's
                sink.write(shown.decode(errors="replace"))
            sink.flush()
        return rest


def without_gloo(lines: list[bytes]) -> list[bytes]:
    """Drops the lines of gloo and, if there are any, the lines with nothing but a rank."""
    others = [line for line in lines if not _OF_GLOO.search(line)]
    if len(others) == len(lines):
        return lines
    return [line for line in others if not _NUMBERS.fullmatch(line)]
