"""The first exception of a callback in a compiled program, such as `jax.debug.callback`.

The program fails on the device that has called the callback. If other devices wait for this device
in a collective, the arrays are never computed, and the exception is not raised: JAX only logs it.
"""

import logging

_LOGGERS = ("jax._src.debugging", "jax._src.callback")
_found: list[BaseException] = []


def note_callback_errors() -> None:
    """From here on the first exception is kept."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if _note not in logger.filters:
            logger.addFilter(_note)


def first_callback_error() -> BaseException | None:
    """The first exception of a callback; None if there was none."""
    return _found[0] if _found else None


def _note(record: logging.LogRecord) -> bool:
    """Keeps the exception of a record, which is logged as before."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and not _found:
        _found.append(error)
    return True
