"""Leaves out the lines in which gloo, JAX's transport on CPUs, reports each of its connections.

It writes them from C++ to standard output, several for each process, and has no switch for them.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

PREFIX = b"[Gloo] Rank "


@contextlib.contextmanager
def unprinted() -> Iterator[None]:
    """While open, standard output is collected; then lines of gloo are dropped, and others follow.

    It is open for milliseconds, while groups of devices connect: a process that is killed then
    loses what it has printed meanwhile.
    """
    sys.stdout.flush()
    with tempfile.TemporaryFile() as taken:
        before = os.dup(1)
        os.dup2(taken.fileno(), 1)
        try:
            yield
            sys.stdout.flush()
        finally:
            os.dup2(before, 1)
            os.close(before)
            taken.seek(0)
            os.write(1, b"".join(line for line in taken if not line.startswith(PREFIX)))
