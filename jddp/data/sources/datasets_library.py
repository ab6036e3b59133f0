"""Hugging Face's library `datasets`: imported when it is needed, quiet, with errors of one line.

with quiet_datasets() as datasets, caching("data/*.parquet"):
rows = datasets.Dataset.from_parquet(files)
"""

import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any

from jddp.data.extras import import_extra
from jddp.errors import Error, FileSystemError

NETWORK = (ConnectionError, TimeoutError, socket.gaierror)


@contextlib.contextmanager
def quiet_datasets() -> Iterator[Any]:
    """The library without progress bars, which would fill a log with lines."""
    datasets = import_extra("datasets", needed_by="this data set")
    # Its environment variable has precedence: datasets would warn of every attempt.
    is_ours = datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS is None
    with contextlib.ExitStack() as afterwards:
        if is_ours and not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            afterwards.callback(datasets.enable_progress_bars)
        for name in ("datasets", "huggingface_hub"):  # of their own view of what is raised too
            log = logging.getLogger(name)
            afterwards.callback(log.setLevel, log.level)
            log.setLevel(logging.CRITICAL)
        yield datasets


@contextlib.contextmanager
def caching(where: object) -> Iterator[None]:
    """While open, an exception is the first of its chain, or about the room of the cache.

    Raises:
      FileSystemError: If the cache of `datasets` cannot be written.
    """
    try:
        yield
    except Error:
        raise
    except Exception as error:
        reason = _reason(error)
        if isinstance(reason, NETWORK) or not isinstance(reason, OSError) or reason.errno is None:
            raise reason from None
        raise FileSystemError(  # no home, or a full one
            f"{where}: datasets cannot cache these files: {reason}. Set HF_HOME to a folder for "
            "them."
        ) from error


def _reason(error: BaseException) -> BaseException:
    """The file-system error in a chain of errors; without one, the first error."""
    while not (isinstance(error, OSError) and error.errno is not None):
        before = error.__cause__ or error.__context__
        if before is None:
            break
        error = before
    return error
