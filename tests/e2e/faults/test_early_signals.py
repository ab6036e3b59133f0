"""A signal at any moment before the first step has ended: the process leaves at once, with 75."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from runs import environment, free_port, wait_until

from faults.jobs import Job
from jddp.ground.errors import ExitCode

pytestmark = pytest.mark.processes
EVERY_STEP = ["train.log_every_steps=1", "train.num_steps=1000000"]  # which no job reaches
# Whose job the program has joined by itself, with JAX's own handler of SIGTERM.
JOINED = """
import itertools, signal, sys
import jax
jax.distributed.initialize(sys.argv[1], 1, 0, cluster_detection_method="deactivate")
import optax
import jddp
from tiny import MLP, loss_fn, make_batch

def batches():
    for number in itertools.count(1):
        if number == int(sys.argv[2]):
            signal.raise_signal(signal.SIGTERM)
        yield make_batch(8)

ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn)
run = jddp.fit(ddp, batches(), num_steps=10**9)
print(run.interrupted)
"""
EARLY = "stopped before the first step. The same command resumes."


def handles(pid, *numbers):
    """Whether a process has handlers of its own for these signals."""
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return all(int(mask, 16) >> (number - 1) & 1 for number in numbers)


def seconds_to_first_step(folder, run):
    began = time.monotonic()
    with Job(folder, *EVERY_STEP, f"run.dir={run}") as job:
        job.wait_for_step(1)
    return time.monotonic() - began


def signal_at(job, moment, rng):
    """Sends a signal, half the time twice, when it is time and Python runs our first lines."""
    number = [signal.SIGTERM, signal.SIGHUP][rng.integers(2)]
    (process,) = job.processes
    job.wait_for(lambda: time.monotonic() >= moment and handles(process.pid, number))
    process.send_signal(number)
    sent = time.monotonic()
    if rng.random() < 0.5:
        wait_until(lambda: process.poll() is not None or time.monotonic() > sent + 0.1)
        process.send_signal(number)
    job.codes()
    return number, time.monotonic() - sent


def signal_at_random_moments(folder, num_signals, seed, most_seconds):
    """Returns how many of the signals came before the first step had ended."""
    rng = np.random.default_rng(seed)
    seconds_to_first_step(folder, "cold")  # and compiles
    early, whole = [], seconds_to_first_step(folder, "warm")
    for trial in range(num_signals):
        began, moment = time.monotonic(), rng.random() * whole
        with Job(folder, *EVERY_STEP, f"run.dir=run-{trial}") as job:
            number, seconds = signal_at(job, began + moment, rng)
            case = moment, seconds, job.outputs
            assert job.codes() == [ExitCode.PREEMPTED], case
            if f"jddp: {number.name}: {EARLY}" in job.said():
                early.append(seconds)
                assert seconds < most_seconds, case
            else:
                assert job.last_saved() > 0, case
        assert "Exception ignored" not in job.said(), case
    print(f"{len(early)} of {num_signals} before the first step; the slowest took {max(early)} s")
    return len(early)


@pytest.mark.slow
def test_a_signal_at_a_random_moment_before_the_first_step_ends_with_75(folder):
    assert signal_at_random_moments(folder, 6, np.random.SeedSequence().entropy, 60.0)


@pytest.mark.long
def test_200_signals_at_random_moments_before_the_first_step_end_with_75_within_5_seconds(folder):
    assert signal_at_random_moments(folder, 200, 0, 5.0) > 100


@pytest.mark.parametrize("at_batch, code, said", [(1, -signal.SIGTERM, ""), (9, 0, "SIGTERM\n")])
def test_fit_hears_a_signal_where_the_program_has_joined_by_jax_alone(at_batch, code, said):
    arguments = [f"127.0.0.1:{free_port()}", str(at_batch)]
    command = [sys.executable, "-c", JOINED, *arguments]
    ended = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=False, timeout=120
    )
    assert (ended.returncode, ended.stdout[-8:]) == (code, said), ended.stderr
