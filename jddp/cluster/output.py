"""What the processes of a group say: whole into a file each, and line by line to the terminal.

A thread reads each stream, so that nobody waits for a pipe to be emptied. What cannot be written,
on a disk that is full or to a terminal that has gone, is told once and no more.
"""

import collections
import contextlib
import re
import sys
import threading
from pathlib import Path
from typing import IO, BinaryIO

NUM_LINES = 200  # which are kept of what went wrong
_SHOWN = 20  # of them, without a traceback to begin with
_LONGEST = 2**16  # bytes of a line before it is shown in parts
_console = threading.Lock()


class Output:
    """Of one process.

    Args:
      prefix: Begins each of its lines in the terminal.
      path: Of its file, to which is added.
      streams: Its standard output and standard error.
    """

    def __init__(self, prefix: str, path: Path, streams: tuple[IO[bytes], IO[bytes]]):
        self._prefix = prefix.encode()
        self._file: BinaryIO | None = path.open("ab", buffering=0)
        self._path = path
        self._lock = threading.Lock()
        self._errors: collections.deque[str] = collections.deque(maxlen=NUM_LINES)
        sinks = (sys.stdout, sys.stderr)
        self._threads = [
            threading.Thread(target=self._copy, args=(stream, sink.buffer), daemon=True)
            for stream, sink in zip(streams, sinks, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Reads to the end, unless somebody else holds a stream open."""
        for thread in self._threads:
            thread.join(timeout_seconds)
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def last_words(self) -> str:
        """The end of its standard error: from the last traceback on, if there is one."""
        lines = list(self._errors)
        starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent")]
        return "\n".join(lines[starts[-1] :] if starts else lines[-_SHOWN:])

    def _copy(self, stream: IO[bytes], sink: BinaryIO) -> None:
        rest = b""
        while chunk := stream.read1(_LONGEST):  # type: ignore[attr-defined]  # it is buffered
            self._keep(chunk)
            *lines, rest = re.split(rb"(?<=[\r\n])", rest + chunk)
            if len(rest) > _LONGEST:
                lines, rest = [*lines, rest + b"\n"], b""
            self._show(lines, sink)
        self._show([rest + b"\n"] if rest else [], sink)

    def _keep(self, chunk: bytes) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(chunk)
            except OSError as error:
                self._file.close()
                self._file = None
                _say(f"{self._path}: {error.strerror}. The terminal alone has the rest.")

    def _show(self, lines: list[bytes], sink: BinaryIO) -> None:
        if sink is sys.stderr.buffer:
            self._errors.extend(line.decode(errors="replace").rstrip() for line in lines)
        with _console, contextlib.suppress(OSError, ValueError):
            for line in lines:
                sink.write(self._prefix + line)
            sink.flush()


def _say(text: str) -> None:
    with _console, contextlib.suppress(OSError):
        print(f"jddp: {text}", file=sys.stderr, flush=True)
