"""The end of a process after a failure."""

import subprocess
import sys

from runs import environment, free_port

# Process 0 of a job of 64, which has JAX's service, and whose others are gone; a moment is short.
ALONE = """
import os
import sys
import time

import jax

from jddp.distributed import failure, failure_file

jax.distributed.initialize(sys.argv[1], num_processes=1, process_id=0)
failure.job.num_processes = lambda: 64
failure._MOMENT = 0.2
exit, began = os._exit, time.monotonic()
os._exit = lambda code: exit(code if 0.6 < time.monotonic() - began < 10 else 1)
failure.end(failure_file.describe(7, 137), "the end")
"""


def test_process_0_waits_three_moments_for_all_that_are_gone_together():
    # One after the other they would take 37 s.
    command = [sys.executable, "-c", ALONE, f"127.0.0.1:{free_port()}"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 137, done.stderr
