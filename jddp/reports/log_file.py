"""What one process said during a run, in a file of its own.

Every line of progress, also those that the terminal did not show, jddp's warnings, and the
traceback of what ended the run, each with its time.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from jddp.errors import FileSystemError

# Lines that are shown elsewhere already: for the file alone.
said = logging.getLogger("jddp.said")
said.setLevel(logging.INFO)
said.propagate = False
said.addHandler(logging.NullHandler())


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """While open, appends what this process says to `path`.

    Raises:
      FileSystemError: If the file cannot be opened.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise FileSystemError(f"{path}: cannot be written: {error.strerror}.") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    loggers = (said, logging.getLogger("jddp"))
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    except BaseException:
        said.exception("ended by:")
        raise
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()
