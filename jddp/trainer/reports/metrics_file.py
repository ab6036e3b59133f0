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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jddp.errors import file_errors
from jddp.typing import Record

log = logging.getLogger("jddp")


class MetricsFile:
    """Appends records to `path`; if not `is_writer`, does nothing."""

    def __init__(self, path: Path, *, is_writer: bool = True) -> None:
        self.path, self._is_writer = path, is_writer
        self._waiting: list[str] = []

    def append(self, record: Record) -> None:
        """Adds one line. A number that is not finite, also in an array, is written as null.

        A line that cannot be written is kept, and written with a later one, with one warning: a
        full disk does not end a run.
        """
        if not self._is_writer:
            return
        self._waiting.append(json.dumps(as_json(record), allow_nan=False) + "\n")
        size = None
        try:
            with self.path.open("a") as file:
                size = file.tell()
                file.writelines(self._waiting)
        except OSError as error:
            if size is not None:
                with contextlib.suppress(OSError):
                    os.truncate(self.path, size)  # Half a line would be joined to the next.
            if len(self._waiting) == 1:
                what = f"{self.path}: cannot be written: {error.strerror}."
                log.error("%s Lines are kept until it can.", what)
        else:
            self._waiting.clear()

    def read(self) -> list[dict[str, Any]]:
        """Returns the complete records, in order; none if there is no file yet.

        Raises:
          FileSystemError: If the file cannot be read.
        """
        return [record for _, record in self._lines() if record is not None]

    def _lines(self) -> list[tuple[bytes, dict[str, Any] | None]]:
        """Every line, with its record, or None for other lines."""
        with file_errors(f"{self.path}: cannot be read"):
            *whole, torn = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]
        # A process may have died while it wrote the last line.
        return [(line, _record(line)) for line in (*whole, *([torn] if _record(torn) else []))]

    def truncate_after(self, step: int) -> None:
        """Drops records of later steps than `step`, and torn lines.

        Raises:
          FileSystemError: If the file cannot be written.
        """
        if not (self._is_writer and self.path.exists()):
            return
        kept = [line + b"\n" for line, x in self._lines() if x is None or x["step"] <= step]
        with file_errors(f"{self.path}: cannot be written"):
            replace_file(self.path, b"".join(kept))


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file atomically: a reader sees the old or the new one, never a part."""
    beside = path.with_name(path.name + ".partial")
    beside.write_bytes(content)
    os.replace(beside, path)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and type(value.get("step")) is int else None


def as_json(value: Any) -> Any:
    """Returns a value as JSON has it: arrays as nested lists, None for what is not finite."""
    if isinstance(value, Mapping):
        return {name: as_json(x) for name, x in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value  # of numpy and JAX
    if isinstance(value, list | tuple):
        return [as_json(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
