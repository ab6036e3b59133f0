"""Keeps orbax and TensorStore from printing errors that jddp reports, and from leaking memory.

Orbax requests TensorStore's counters around every save, to log a throughput that jddp does not
show. TensorStore never frees its answer: about 25 kB for each save.
"""

import contextlib
import functools
import logging
import re
import sys
import warnings
from pathlib import Path

# If several reads or writes fail, the first error is raised. Asyncio would print the others, and
# Python errors that TensorStore reports later, to a loop that orbax has closed.
_REFUSED = re.compile("os_error_code=|'OSError'")
_LATE = "Event loop is closed"


@functools.cache
def keep_quiet() -> None:
    """From the first call on, they print only errors that jddp does not report, and never count."""
    # The function has no public name: without the private one there is nothing to keep.
    with contextlib.suppress(ImportError, AttributeError):
        from orbax.checkpoint._src.serialization import tensorstore_utils

        if callable(tensorstore_utils.get_tensorstore_raw_bytes):
            tensorstore_utils.get_tensorstore_raw_bytes = lambda *_: 0
    logging.getLogger("absl").addFilter(_is_worth_showing)
    logging.getLogger("asyncio").addFilter(lambda x: not _REFUSED.search(str(x.exc_info)))
    show = sys.unraisablehook
    sys.unraisablehook = lambda x: show(x) if x.object or str(x.exc_value) != _LATE else None
    # Not begun, after an error.
    warnings.filterwarnings("ignore", "coroutine 'async_serialize_from_host")


def _is_worth_showing(record: logging.LogRecord) -> bool:
    # Orbax writes some hundred lines a checkpoint to absl's log; a run has its own lines.
    is_error = record.levelno >= logging.ERROR and not record.exc_info
    return is_error or "orbax" not in Path(record.pathname).parts
