"""Keeps orbax from asking for counters, which leaves memory behind at each save.

Orbax asks TensorStore for its counters around every save, to log a throughput that jddp does not
show, and TensorStore's answer is never freed: some 25 kB for each save.
"""

import contextlib
import functools


@functools.cache
def keep_level() -> None:
    """From here on orbax does not ask for them."""
    # Its function has no public name: without the private one there is nothing to keep.
    with contextlib.suppress(ImportError, AttributeError):
        from orbax.checkpoint._src.serialization import tensorstore_utils

        if callable(tensorstore_utils.get_tensorstore_raw_bytes):
            tensorstore_utils.get_tensorstore_raw_bytes = _no_bytes


def _no_bytes(*_: object) -> int:
    return 0
