"""The records of a run, in order; records before a resume are read only on demand.

A run of weeks leaves millions of lines. To resume, it needs only its evaluations, so the other
records stay in their file until they are plotted.
"""

import json
from collections.abc import Callable
from typing import Any

from jddp.distributed.coordination import from_first
from jddp.trainer.reports.run_directory import RunDirectory

Records = list[dict[str, Any]]
SECONDS = 600.0  # for process 0 to read the file


class History:
    """The records of training and evaluation."""

    def __init__(self) -> None:
        self._records: Records = []
        self._read_earlier: Callable[[], Records] | None = None

    def begin_with(self, read: Callable[[], Records]) -> None:
        """Puts earlier records, which `read` returns, before all appended records."""
        self._read_earlier = read

    def append(self, record: dict[str, Any]) -> None:
        """Adds a record."""
        self._records.append(record)

    def records(self) -> Records:
        """All records, earlier ones included."""
        if self._read_earlier is not None:
            self._records[:0] = self._read_earlier()
            self._read_earlier = None
        return self._records


def resume_records(history: History, files: RunDirectory, step: int) -> Records:
    """Drops the records of later steps; returns the remaining evaluations, equal on all processes.

    Only process 0 reads the file now.

    Raises:
      FileSystemError: If it cannot be read or written.
    """
    kept = files.metrics.resume_at(step)
    shared = from_first("records", json.dumps(kept), timeout_seconds=SECONDS)
    size, evaluations = json.loads(shared)
    read = files.metrics.read
    history.begin_with(lambda: [record for record in read(size) if record["step"] <= step])
    return list(evaluations)
