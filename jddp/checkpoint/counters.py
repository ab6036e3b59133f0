"""Keeps orbax from requesting counters, which leaks memory at each save.

Orbax requests TensorStore's counters around every save, to log a throughput that jddp does not
show. TensorStore never frees its answer: about 25 kB for each save.
"""

import contextlib
import functools


@functools.cache
def keep_level() -> None:
    """From the first call on, orbax requests no counters."""
    # Its function has no public name: without the private one there is nothing to keep.
    with contextlib.suppress(ImportError, AttributeError):
        from orbax.checkpoint._src.serialization import tensorstore_utils

        if callable(tensorstore_utils.get_tensorstore_raw_bytes):
            tensorstore_utils.get_tensorstore_raw_bytes = lambda *_: 0
