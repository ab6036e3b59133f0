"""Lines of gloo are left out of standard output, and all others stay in their order."""

import os
import subprocess
import sys

import pytest
from runs import environment

SCRIPT = """
import os, sys
from jddp.distributed import gloo

print("before")
try:
    with gloo.unprinted():
        os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks.\\n")
        # Of two threads, which write parts of lines at once:
        os.write(1, b"[Gloo] Rank [Gloo] Rank 56 is connected to  is connected to 77 peers.\\n")
        os.write(1, b"6 is connected to 7 peer ranks. Expected number is : 7\\n\\n")
        os.write(1, b"7 peer ranks. Expected number of connected peer ranks is : 7\\n")
        os.write(1, b"Expected number of connected peer ranks is : \\n7\\n")
        print("inside")
        os.write(1, b"[Gloo] Rank 1 is connected to 1 peer ranks.\\nof C\\n")
        if "fails" in sys.argv:
            raise ValueError
finally:
    print("after")
"""


@pytest.mark.parametrize("how", ["passes", "fails"])
def test_lines_of_gloo_are_dropped_and_others_follow(how):
    command = [sys.executable, "-c", SCRIPT, how]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert (done.returncode == 0) == (how == "passes")
    assert "[Gloo]" not in done.stdout
    assert sorted(done.stdout.split("\n")) == sorted(["before", "inside", "of C", "after", ""])
    assert done.stdout.index("before") == 0


def test_standard_output_is_itself_again(capfd):
    from jddp.distributed import gloo

    number = os.fstat(1).st_ino
    with gloo.unprinted():
        pass
    assert os.fstat(1).st_ino == number
