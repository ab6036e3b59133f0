"""`kill -9` at any instant: the same command ends as if nothing had been."""

import re

import numpy as np
import pytest

from faults.jobs import Job, assert_ends, assert_same_run, make_folder
from jddp.checkpoint.folders import find_damage

pytestmark = pytest.mark.processes


def kill_once(folder, rng, arguments):
    """Starts the run, and kills it at some instant; False if it had ended."""
    with Job(folder, *arguments) as job:
        until, in_save = job.num_steps() + int(rng.integers(1, 60)), rng.random() < 0.5
        checkpoints, (process,) = job.run_dir / "checkpoints", job.processes

        def is_time():
            is_saving = any(path.suffix == ".new" for path in checkpoints.glob("*"))
            done = job.num_steps() >= until
            return process.poll() is not None or (done and (is_saving or not in_save))

        job.wait_for(is_time)
        has_ended = process.poll() is not None
        process.kill()
        job.codes()
    for step in job.saved():
        assert find_damage(checkpoints / str(step)) is None, f"step {step}"
    assert not list(checkpoints.glob("*.damaged"))
    return not has_ended


def kill_and_go_on(folder, golden, num_kills, seed, *arguments):
    rng, often = np.random.default_rng(seed), (*arguments, "checkpoint.every_steps=20")
    for killed in range(num_kills):
        assert kill_once(folder, rng, often), f"over after {killed} kills"
    assert_same_run(assert_ends(folder, *often), golden(*arguments))


@pytest.mark.slow
def test_a_run_that_is_killed_five_times_ends_as_one_that_was_not(folder, golden):
    kill_and_go_on(folder, golden, 5, np.random.SeedSequence().entropy)


@pytest.mark.slow
def test_two_processes_resume_from_memory_if_one_is_killed(folder, golden):
    two = ["mesh.num_devices=auto", "train.num_steps=300"]
    keys = ["checkpoint.every_steps=null", "checkpoint.memory_every_steps=30"]
    with Job(folder, *two, *keys, num_processes=2) as job:
        job.wait_for_step(100)
        job.processes[1].kill()
        job.codes()
    recorded = job.num_steps()
    job = assert_ends(folder, *two, *keys, num_processes=2)
    (resumed,) = re.findall(r"resumed from step (\d+)", job.outputs[0][0])
    assert int(resumed) >= recorded - 50  # A state comes a few steps after the 30th.
    assert_same_run(job, golden(*two, num_processes=2))
    assert not (job.run_dir / "memory").exists()


@pytest.mark.long
@pytest.mark.parametrize("hundred", range(10))
def test_runs_killed_a_hundred_times_end_as_one_that_was_not(folder, cache, golden, hundred):
    # In ten runs: in one, 100 times up to 60 steps would be more than the 2,000 there are.
    for seed in range(10 * hundred, 10 * hundred + 10):
        own = make_folder(folder / str(seed), cache)
        kill_and_go_on(own, golden, 10, seed, "train.num_steps=2000")
