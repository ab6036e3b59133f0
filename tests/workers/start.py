"""Starts the processes of a job on this machine, and waits for them."""

import subprocess
import sys

from runs import compiling_as_here, environment, free_port

from jddp.distributed.group import without_gloo
from jddp.distributed.identity import VARIABLES


def of_job(num_processes=2, **variables):
    """The variables of each process of a job on this machine."""
    address, count = f"127.0.0.1:{free_port()}", str(num_processes)
    numbers = [(address, count, str(process)) for process in range(num_processes)]
    return [variables | dict(zip(VARIABLES, each, strict=True)) for each in numbers]


def run_module(module, folder, variables, seconds, *arguments):
    """Runs `python -m module folder arguments` once with each set of variables."""
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
