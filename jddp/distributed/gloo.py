"""Leaves out the lines in which gloo, JAX's transport on CPUs, reports each of its connections.

gloo writes them from C++ to standard output, several for each process, and cannot be silenced.
"""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

# Threads of several devices write the parts of their lines at once, so a line may lack any part.
_OF_GLOO = re.compile(
    rb"\[Gloo\] Rank | is connected to \d| peer ranks\. |number of connected peer ranks is : "
)
_NUMBERS = re.compile(rb"[\d\s]*")


def is_of_gloo(line: bytes) -> bool:
    """Whether a line of standard output is one of gloo's, or a part of one."""
    return _OF_GLOO.search(line) is not None


@contextlib.contextmanager
def unprinted() -> Iterator[None]:
    """While open, standard output is collected; at the end it is printed without lines of gloo.

    It is open for milliseconds, while groups of devices connect. A process that is killed in this
    time loses its output of this time.
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
            os.write(1, _without_gloo(taken.readlines()))


def _without_gloo(lines: list[bytes]) -> bytes:
    """The lines that are not of gloo; if any is, those with nothing but a rank are of it too."""
    others = [line for line in lines if not is_of_gloo(line)]
    if len(others) < len(lines):
        others = [line for line in others if not _NUMBERS.fullmatch(line)]
    return b"".join(others)
