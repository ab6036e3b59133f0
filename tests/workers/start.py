"""Starts the processes of a job on this machine, and waits for them."""

import subprocess
import sys

from runs import compiling_as_here, environment

from jddp.distributed.group import without_gloo


def run_module(module, folder, variables, seconds, *arguments):
    """Runs `python -m module folder arguments` once with each set of variables.

    Returns the standard output, without the lines of gloo, and the standard error of each.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, folder, *arguments],
            env=environment(**compiling_as_here(), **each),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in variables
    ]
    try:
        outputs = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()  # does nothing to one that has ended
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return [("".join(_but_gloo(said)), errors) for said, errors in outputs]


def _but_gloo(said):
    return (x.decode() for x in without_gloo(said.encode().splitlines(keepends=True)))
