"""A file of metrics, one JSON object per line, with every step once.

A run that resumes from step 400 first removes the records of later steps, so that no step is there
twice. A line is complete or, if the process died in the middle of it, dropped when the file is cut.
Other lines, such as notes, are kept and are no records.
"""

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from jddp.ground.errors import FileSystemError, file_errors, words_of
from jddp.ground.files import SameFolder, write_all
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
        self.lost: FileSystemError | None = None

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
            what = f"{self.path}: cannot be written: {words_of(self._failure)}."
            log.error("%s Lines are kept in memory until it can.", what)

    def close(self) -> None:
        """Writes the lines that were kept."""
        if self._waiting:
            self._write()
        if self._failure is not None:
            steps = sorted({step for step, _ in self._waiting})
            which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
            self.lost = FileSystemError(
                f"{self.path}: cannot be written: {words_of(self._failure)}. The records of "
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
        with file_errors(f"{self.path}: cannot be written"):
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
        with file_errors(f"{self.path}: cannot be read"), self.path.open("rb") as file:
            for line in file:
                yield line, _record(line)

    def _lines_until(self, step: int) -> Iterator[tuple[bytes, JsonObject | None]]:
        """The lines that stay in a run that resumes at a step."""
        for line, record in self._lines():
            is_whole = line.endswith(b"\n")  # A process may have died while it wrote the last one.
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


def _record(line: bytes) -> JsonObject | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and type(value.get("step")) is int else None


def as_json(value: object) -> object:
    """Converts a value to JSON: arrays to nested lists, numbers that are not finite to None."""
    if isinstance(value, Mapping):
        return {name: as_json(x) for name, x in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value  # of numpy and JAX
    if isinstance(value, list | tuple):
        return [as_json(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
