"""A process that ends while others wait for it is named; one that only ends first is not."""

import json
import socket
import sys
import time

import pytest
from runs import environment, free_port

from faults.jobs import Job
from jddp.distributed.failure_file import VARIABLE
from jddp.distributed.identity import VARIABLES

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SECONDS = 240  # in which processes start and end on a machine that is busy
PROMISED = 10  # seconds until the others know, twice which are allowed
EARLY = "ended too early, while others wait for it: give all equally many steps"


def run(folder, how, number, *names, num_devices=1):
    """Runs a job of two; returns codes, what each said, and the seconds since one has left."""
    command, port = [sys.executable, "-m", "workers.leaves", how, str(number)], free_port()
    with Job(folder, num_processes=0) as job:
        for process in range(2):
            values = ("127.0.0.1", port, 2, process) if names else (f"127.0.0.1:{port}", 2, process)
            about = dict(zip(names or VARIABLES, map(str, values), strict=True))
            about |= {"JAX_NUM_CPU_DEVICES": str(num_devices)}
            about[VARIABLE] = str(folder / f"failure-{process}.json")
            job._start(command, cwd=folder, env=environment(**about))
        codes, left = [process.wait(SECONDS) for process in job.processes], folder / "left"
    seconds = time.time() - left.stat().st_mtime if left.exists() else 0.0
    return codes, ["".join(each) for each in job.outputs], seconds


@pytest.mark.parametrize(
    "how, number, code, names, options",
    [
        ("stop", 1, 0, ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"), {}),  # torchrun's
        ("exit", 0, 3, (), {"num_devices": 2}),
        ("answer", 1, 0, (), {}),
    ],
)
def test_a_process_that_ends_as_the_other_waits_is_named(folder, how, number, code, names, options):
    codes, said, seconds = run(folder, how, number, *names, **options)
    assert codes[number] == code, said
    assert codes[1 - number] == 81, said
    assert f"jddp: process {number} on {socket.gethostname()} {EARLY}" in said[1 - number]
    failure = json.loads((folder / f"failure-{1 - number}.json").read_text())
    # Only the shell sees the code of a program that leaves.
    assert (failure["process"], failure["exit_code"]) == (number, None)
    # JAX's service stays for some seconds more, for the process that is ending.
    assert seconds < 2 * PROMISED + 5


def test_a_process_that_works_on_after_another_has_ended_is_no_failure(folder):
    codes, said, _ = run(folder, "ordinary", 1)
    assert codes == [0, 0], said
    assert not any("jddp:" in text for text in said)
