"""The log file of one process of a run.

It begins with the process, its host and its command, and has every line of progress, including
lines that the terminal did not show, jddp's warnings, and the traceback of the exception that ended
the run, each with its time.
"""

import contextlib
import logging
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from jddp.errors import file_errors, printable, printable_lines, report, words_of
from jddp.files import make_folder, opener

# Lines that are printed elsewhere already: for the file alone.
said = logging.getLogger("jddp.lines")
said.setLevel(logging.INFO)
said.propagate = False
said.addHandler(logging.NullHandler())


class _LogFile(logging.FileHandler):
    """Reports each kind of write failure once; logging itself would print every traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        reason = words_of(error) if isinstance(error, OSError) else repr(error)
        if reason not in self.__dict__.setdefault("reported", set()):
            self.__dict__["reported"].add(reason)
            report(f"{self.baseFilename}: cannot be written: {reason}.")


class _Lines(logging.Formatter):
    """Lines with their time, without characters that would control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """While open, appends the lines of this process to `path`.

    Raises:
      FileSystemError: If the file cannot be opened.
    """
    with file_errors(f"{path}: cannot be written"):
        make_folder(path.parent)
        open(path, "ab", opener=opener).close()
        handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(message)s"))
    loggers = (said, logging.getLogger("jddp"))
    for logger in loggers:
        logger.addHandler(handler)
    said.info("begins: process %d on %s", os.getpid(), socket.gethostname())
    said.info("command: %s", printable(shlex.join(sys.orig_argv)))
    try:
        yield
    except BaseException:
        said.exception("ended by:")
        raise
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        with contextlib.suppress(OSError):  # which has been reported
            handler.close()
