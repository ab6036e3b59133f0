"""A launch shows all output but lines of gloo."""

from jddp.distributed.worker import without_gloo

GLOO = b"""\
[Gloo] Rank 0 is connected to 1 peer ranks.
[Gloo] Rank [Gloo] Rank 56 is connected to  is connected to 77 peers.
6 is connected to 7 peer ranks. Expected number is : 7

7 peer ranks. Expected number of connected peer ranks is : 7
Expected number of connected peer ranks is :\x20
7
"""  # as threads of several devices write parts of lines at once


def test_lines_of_gloo_are_dropped_and_others_keep_their_order():
    lines = [b"before\n", *GLOO.splitlines(keepends=True), b"inside\n", b"of C\n", b"after"]
    assert without_gloo(lines) == [b"before\n", b"inside\n", b"of C\n", b"after"]
    lines = [b"loss\n", b"7\n", b"\n"]  # of no gloo
    assert without_gloo(lines) == lines
