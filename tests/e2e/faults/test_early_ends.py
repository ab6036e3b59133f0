"""A process that ends while others wait for it is named; one that only ends first is not."""

import json
import socket
import subprocess
import sys
import time

import pytest
from runs import environment, free_port
from sweeps import swept

from jddp.distributed.failure_file import VARIABLE
from jddp.distributed.identity import VARIABLES

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SECONDS = 240  # in which processes start and end on a machine that is busy
PROMISED = 10  # seconds until the others know, twice which are allowed
EARLY = "ended too early, while others wait for it: give all equally many steps"


def variables(process, port, launcher):
    if launcher == "torchrun":
        names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
        values = ("127.0.0.1", port, 2, process)
    else:
        names, values = VARIABLES, (f"127.0.0.1:{port}", 2, process)
    return dict(zip(names, map(str, values), strict=True))


def run(folder, how, number, *, launcher="by hand", num_devices=1):
    """Runs a job of two; returns codes, what each said, and the seconds since one has left."""
    command, port = [sys.executable, "-m", "workers.leaves", how, str(number)], free_port()
    processes, files = [], []
    for process in range(2):
        about = variables(process, port, launcher) | {"JAX_NUM_CPU_DEVICES": str(num_devices)}
        about[VARIABLE] = str(folder / f"failure-{process}.json")
        files.append(folder / f"said-{process}")
        with files[-1].open("w") as said:
            how = {"cwd": folder, "env": environment(**about), "stdout": said, "stderr": said}
            processes.append(subprocess.Popen(command, **how))
    try:
        codes = [process.wait(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()  # does nothing to one that has ended
            process.wait()
    left = folder / "left"
    seconds = time.time() - left.stat().st_mtime if left.exists() else 0.0
    return codes, [file.read_text() for file in files], seconds


@pytest.mark.parametrize(
    "how, number, code, options",
    swept(
        [
            ("stop", 1, 0, {"launcher": "torchrun"}),
            ("stop", 0, 0, {"num_devices": 2}),
            ("exit", 1, 3, {}),
            ("exit", 0, 3, {}),
            ("answer", 1, 0, {}),
        ],
        every=2,
    ),
)
def test_a_process_that_ends_while_the_other_waits_is_named(tmp_path, how, number, code, options):
    codes, said, seconds = run(tmp_path, how, number, **options)
    assert codes[number] == code, said
    assert codes[1 - number] == 81, said
    assert f"jddp: process {number} on {socket.gethostname()} {EARLY}" in said[1 - number]
    failure = json.loads((tmp_path / f"failure-{1 - number}.json").read_text())
    # Only the shell sees the code of a program that leaves.
    assert (failure["process"], failure["exit_code"]) == (number, None)
    # JAX's service stays for some seconds more, for the process that is ending.
    assert seconds < 2 * PROMISED + 5


def test_a_process_that_works_on_after_another_has_ended_is_no_failure(tmp_path):
    codes, said, _ = run(tmp_path, "ordinary", 1)
    assert codes == [0, 0], said
    assert not any("jddp:" in text for text in said)
