"""Starts the processes of a job on this machine, and waits for them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_module(module, folder, environments, seconds):
    """Runs `python -m module folder` once in each environment; a stuck process is killed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    told = {"PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, folder],
            env=kept | told | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in environments
    ]
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()  # does nothing to one that has ended
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
