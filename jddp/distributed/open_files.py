"""Raises the soft limit of open files, for the connections of a process to all others.

`ulimit -n` is 1,024 in many shells, and 256 on macOS; each connection is an open file.
"""

import contextlib
import os
import resource
from pathlib import Path

from jddp.errors import CoordinatorError

_SPARE = 256  # for libraries, and for connections of other programs
_PER_CONNECTION = 2  # to the process itself, and to JAX's service


def allow_connections(num: int) -> None:
    """Raises the limit of open files, if this number of connections may need it.

    Raises:
      CoordinatorError: If the hard limit is lower than their number.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _num_open() + _PER_CONNECTION * num + _SPARE
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _num_open() + num:
        raise too_few(num, soft)


def too_few(num: int, limit: int | None = None) -> CoordinatorError:
    """The error of a process that has fewer open files than connections."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    return CoordinatorError(
        f"{num} connections need as many open files, but the limit here is {limit}. Raise it: "
        f"ulimit -n {_num_open() + _PER_CONNECTION * num + _SPARE} (or the hard limit of the "
        "service that starts the job)."
    )


def _num_open() -> int:
    with contextlib.suppress(OSError):
        return sum(1 for _ in Path("/proc/self/fd").iterdir())
    return sum(_is_open(number) for number in range(256))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
