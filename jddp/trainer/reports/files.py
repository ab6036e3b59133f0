"""The files of a run that grow: its metrics, the log of each process, and its events.

`metrics.jsonl` has one JSON object per line, with every step once. A run that resumes from step 400
first removes the records of later steps, so that no step is there twice. A line is complete or, if
the process died in the middle of it, dropped when the file is cut. Other lines, such as notes, are
kept and are no records.

A log begins with the process, its host and its command, and has every line of progress, including
lines that the terminal did not show, jddp's warnings, and the traceback of the exception that ended
the run, each with its time.

Process 0 also writes `events.jsonl`, which pages read: an object for each line that reports an
event or is a warning, with its `time`, `kind` and `text`, and the facts of its kind:

    begin: host    step, eval: step, num_steps    first step, stopped, signal, spike, skipped: step
    resumed: step, start_seconds, restore_seconds    failed: error    warning

JSON turns keys into text and tuples into lists, and knows no bytes. Values of a run's state that it
would change are written as the text of a literal, which is read back without running code.
"""

import ast
import contextlib
import json
import logging
import math
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from jddp.ground import errors
from jddp.ground.files import SameFolder, make_folder, opener, write_all
from jddp.ground.typing import JsonObject, Record

log = logging.getLogger("jddp")


class MetricsFile:
    """A sink that appends records to `path`; if not `is_writer`, it does nothing.

    Args:
      path: Path of the file.
      is_writer: Whether this process writes.
      folder: The folder of the file, which must stay the same.

    Attributes:
      lost: The error for which records are lost, once the file is closed; None if there is none.
    """

    def __init__(
        self, path: Path, *, is_writer: bool = True, folder: SameFolder | None = None
    ) -> None:
        self.path, self._is_writer = path, is_writer
        self._folder = folder or SameFolder(path.parent)
        self._waiting: list[tuple[int, bytes]] = []  # step and line
        self._failure: OSError | None = None
        self.lost: errors.FileSystemError | None = None

    def log(self, record: Record) -> None:
        """Adds one line. A number that is not finite, also in an array, is written as null.

        A line that cannot be written is kept, and written with a later one, with one warning: a
        full disk does not end a run.
        """
        if not self._is_writer:
            return
        line = json.dumps(as_json(record), allow_nan=False) + "\n"
        self._waiting.append((int(record["step"]), line.encode()))
        self._write()
        if self._failure is not None and len(self._waiting) == 1:
            what = f"{self.path}: cannot be written: {errors.words_of(self._failure)}."
            log.error("%s Lines are kept in memory until it can.", what)

    def close(self) -> None:
        """Writes the lines that were kept."""
        if self._waiting:
            self._write()
        if self._failure is not None:
            steps = sorted({step for step, _ in self._waiting})
            which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
            self.lost = errors.FileSystemError(
                f"{self.path}: cannot be written: {errors.words_of(self._failure)}. The records of "
                f"{which} are lost (lines: {len(self._waiting)}); checkpoints are not."
            )

    def read(self, size: int | None = None) -> list[JsonObject]:
        """Returns the complete records, in order; none if there is no file yet.

        Args:
          size: Number of bytes to read; None for all.

        Raises:
          FileSystemError: If the file cannot be read.
        """
        records = list[JsonObject]()
        seen = 0
        for line, record in self._lines():
            seen += len(line)
            if size is not None and seen > size:
                break
            if record is not None:
                records.append(record)
        return records

    def resume_at(self, step: int) -> tuple[int, list[JsonObject]]:
        """Drops records of steps after `step`, and a torn line.

        Returns:
          The number of bytes that stay, and the records of evaluations in them.

        Raises:
          FileSystemError: If the file cannot be read or written.
        """
        size, evaluations = 0, list[JsonObject]()
        if not (self._is_writer and self.path.exists()):
            return size, evaluations
        for line, record in self._lines_until(step):
            size += len(line)
            if record is not None and record.get("split") == "eval":
                evaluations.append(record)
        with errors.file_errors(f"{self.path}: cannot be written"):
            if size != self.path.stat().st_size:
                lines = (line for line, _ in self._lines_until(step))
                self._folder.replace(self.path.name, lines)
        return size, evaluations

    def _write(self) -> None:
        try:
            with self._folder.open(self.path.name, "a+b") as file:
                _append(file, b"".join(line for _, line in self._waiting))
        except OSError as error:
            self._failure = error
        else:
            self._failure = None
            self._waiting.clear()

    def _lines(self) -> Iterator[tuple[bytes, JsonObject | None]]:
        """Every line, with its record if it is one."""
        if not self.path.exists():
            return
        with errors.file_errors(f"{self.path}: cannot be read"), self.path.open("rb") as file:
            for line in file:
                yield line, record_in(line)

    def _lines_until(self, step: int) -> Iterator[tuple[bytes, JsonObject | None]]:
        """The lines that stay in a run that resumes at a step."""
        for line, record in self._lines():
            is_whole = line.endswith(b"\n")  # A process may have died while it wrote the last line.
            if is_whole if record is None else record["step"] <= step:
                yield (line if is_whole else line + b"\n"), record


def _append(file: IO[bytes], content: bytes) -> None:
    """Appends whole lines, or nothing."""
    size = file.seek(0, os.SEEK_END)
    # A failed write that could not be undone may have left half a line: begin a new one.
    is_torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
    try:
        write_all(file, b"\n" + content if is_torn else content)
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(size)
        raise


def record_in(line: bytes) -> JsonObject | None:
    """The record that a line of a metrics file holds; None for any other line."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and type(value.get("step")) is int else None


def as_json(value: object) -> object:
    """Converts a value to JSON: arrays to nested lists, numbers that are not finite to None."""
    if isinstance(value, Mapping):
        return {name: as_json(x) for name, x in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value  # Arrays of NumPy and JAX.
    if isinstance(value, list | tuple):
        return [as_json(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Lines that are printed elsewhere already. Without a parent logger they reach the file alone.
said = logging.Logger("jddp.lines", logging.INFO)


def say(text: str, kind: str = "", **facts: object) -> None:
    """Adds a line to the log file, and if it reports an event, the event.

    Args:
      text: The line.
      kind: Kind of the event; "" for a line that reports none.
      **facts: Values of the event, such as its step.
    """
    said.info("%s", text, extra={"event": {"kind": kind, **facts}} if kind else None)


class _LogFile(logging.FileHandler):
    """Reports each kind of write failure once; logging itself would print every traceback."""

    def __init__(self, path: Path, lines: logging.Formatter) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(lines)
        self._reported = set[str]()

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        reason = errors.words_of(error) if isinstance(error, OSError) else repr(error)
        if reason not in self._reported:
            self._reported.add(reason)
            errors.report(f"{self.baseFilename}: cannot be written: {reason}.")


class _Lines(logging.Formatter):
    """Lines with their time, without characters that would control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return errors.printable_lines(super().format(record))


class _Events(logging.Formatter):
    """Objects of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).isoformat(timespec="milliseconds")
        event = getattr(record, "event", {"kind": "warning"})
        return json.dumps({"time": time, **event, "text": errors.printable(record.getMessage())})


@contextlib.contextmanager
def logging_to(path: Path, events: Path | None = None) -> Iterator[None]:
    """While open, appends the lines of this process to `path`, and its events to `events`.

    Raises:
      FileSystemError: If a file cannot be opened.
    """
    handlers = [_opened(path, _Lines("%(asctime)s %(levelname)s %(message)s"))]
    if events is not None:
        handlers.append(_opened(events, _Events()))
        handlers[1].addFilter(lambda x: hasattr(x, "event") or x.levelno >= logging.WARNING)
    loggers = (said, logging.getLogger("jddp"))
    for logger in loggers:
        for handler in handlers:
            logger.addHandler(handler)
    host = socket.gethostname()
    say(f"begins: process {os.getpid()} on {host}", "begin", host=host)
    say(f"command: {errors.printable(shlex.join(sys.orig_argv))}")
    try:
        yield
    except BaseException as error:
        event = {"kind": "failed", "error": errors.printable(f"{type(error).__name__}: {error}")}
        said.exception("ended by:", extra={"event": event})
        raise
    finally:
        for handler in handlers:
            for logger in loggers:
                logger.removeHandler(handler)
            with contextlib.suppress(OSError):  # The error has been reported.
                handler.close()


def _opened(path: Path, lines: logging.Formatter) -> _LogFile:
    with errors.file_errors(f"{path}: cannot be written"):
        make_folder(path.parent)
        open(path, "ab", opener=opener).close()
        return _LogFile(path, lines)


LITERAL = "@python"  # the only key of an object that holds a literal


def to_plain(value: object, called: str) -> Any:
    """Returns values of JSON for a value: itself, or the text of a literal.

    Args:
      value: Numbers, text, bytes, None, and lists, tuples and dicts of them. NumPy's numbers come
        back as Python's numbers.
      called: Name of the value, for an error.

    Raises:
      ConfigError: If it holds anything else.
    """
    import numpy as np  # A run directory is checked before NumPy is imported.

    for given in (value, {LITERAL: repr(value)}):
        with contextlib.suppress(TypeError, ValueError, SyntaxError, RecursionError):
            plain = json.loads(json.dumps(given, default=np.generic.item))
            back = from_plain(plain)
            if back == value or repr(back) == repr(value):  # NaN is not equal to itself.
                return plain
    raise errors.ConfigError(
        f"{called} cannot be saved: {str(value)[:80]!r}. Give numbers, text, lists, tuples, dicts."
    )


def from_plain(plain: Any) -> Any:
    """Returns the value that `to_plain` has converted to this one."""
    is_literal = isinstance(plain, dict) and plain.keys() == {LITERAL}
    return ast.literal_eval(plain[LITERAL]) if is_literal else plain
