"""The log file of one process of a run, and the file of its events.

The log begins with the process, its host and its command, and has every line of progress, including
lines that the terminal did not show, jddp's warnings, and the traceback of the exception that ended
the run, each with its time.

Process 0 also writes `events.jsonl`, which pages read: an object for each line that reports an
event or is a warning, with its `time`, `kind` and `text`, and the facts of its kind:

    begin: host    step, eval: step, num_steps    resumed, stopped, signal, spike, skipped: step
    failed: error  warning
"""

import contextlib
import json
import logging
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from jddp.ground.errors import file_errors, printable, printable_lines, report, words_of
from jddp.ground.files import make_folder, opener

# For lines that are printed elsewhere already: of no other logger, so they reach the file alone.
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
        reason = words_of(error) if isinstance(error, OSError) else repr(error)
        if reason not in self._reported:
            self._reported.add(reason)
            report(f"{self.baseFilename}: cannot be written: {reason}.")


class _Lines(logging.Formatter):
    """Lines with their time, without characters that would control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


class _Events(logging.Formatter):
    """Objects of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).isoformat(timespec="milliseconds")
        event = getattr(record, "event", {"kind": "warning"})
        return json.dumps({"time": time, **event, "text": printable(record.getMessage())})


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
    say(f"command: {printable(shlex.join(sys.orig_argv))}")
    try:
        yield
    except BaseException as error:
        event = {"kind": "failed", "error": printable(f"{type(error).__name__}: {error}")}
        said.exception("ended by:", extra={"event": event})
        raise
    finally:
        for handler in handlers:
            for logger in loggers:
                logger.removeHandler(handler)
            with contextlib.suppress(OSError):  # It has been reported.
                handler.close()


def _opened(path: Path, lines: logging.Formatter) -> _LogFile:
    with file_errors(f"{path}: cannot be written"):
        make_folder(path.parent)
        open(path, "ab", opener=opener).close()
        return _LogFile(path, lines)
