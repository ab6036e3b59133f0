"""A file of metrics, one JSON object a line, in which every step stands once.

A run that resumes from step 400 cuts off what an earlier life wrote behind step 400 before it goes
on, so that a reader never meets a step twice. A line is complete or, if the process died in the
middle of it, dropped when the file is cut.
"""

import contextlib
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jddp.errors import FileSystemError

Record = Mapping[str, Any]
log = logging.getLogger("jddp")


class MetricsFile:
    """Appends records to `path`; if not `is_writer`, does nothing."""

    def __init__(self, path: Path, *, is_writer: bool = True) -> None:
        self.path = path
        self._is_writer = is_writer
        self._waiting: list[str] = []

    def append(self, record: Record) -> None:
        """Adds one line. A number that is not finite is written as null, for JSON has none.

        What cannot be written is said once, kept, and written with a later line: a full disk does
        not end a run.
        """
        if not self._is_writer:
            return
        plain = {name: _plain(value) for name, value in record.items()}
        self._waiting.append(json.dumps(plain, allow_nan=False) + "\n")
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a") as file:
                file.writelines(self._waiting)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)  # Half a line would be joined to the next.
            if len(self._waiting) == 1:
                log.error(
                    "%s: cannot be written: %s. Lines are kept until it can.",
                    self.path,
                    error.strerror,
                )
        else:
            self._waiting.clear()

    def read(self) -> list[dict[str, Any]]:
        """Returns the complete records, in order; none if there is no file yet."""
        if not self.path.exists():
            return []
        records = []
        for line in self.path.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # A process died while it wrote this line.
        return records

    def truncate_after(self, step: int) -> None:
        """Drops records of later steps than `step`, and torn lines.

        Raises:
          FileSystemError: If the file cannot be written.
        """
        if not (self._is_writer and self.path.exists()):
            return
        kept = [json.dumps(record) + "\n" for record in self.read() if record["step"] <= step]
        beside = self.path.with_suffix(".partial")
        try:
            beside.write_text("".join(kept))
            os.replace(beside, self.path)
        except OSError as error:
            raise FileSystemError(f"{self.path}: cannot be written: {error.strerror}.") from error


def _plain(value: Any) -> Any:
    """Returns a number as JSON has it; numpy's and JAX's scalars have `item`."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
