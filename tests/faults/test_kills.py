"""`kill -9` at any instant: the same command ends as if nothing had been."""

import numpy as np
import pytest

from faults.jobs import Job, assert_same_run, make_folder
from jddp.checkpoint.checksums import find_damage

pytestmark = pytest.mark.processes

OFTEN = ["checkpoint.every_steps=20", "checkpoint.keep=2"]


def kill_once(folder, rng, killed):
    """Starts the run, kills it at some instant, and says at which; False if it had ended."""
    with Job(folder, *OFTEN) as job:
        before, more = job.num_steps(), int(rng.integers(1, 60))
        in_save = bool(rng.random() < 0.5)
        checkpoints = job.run_dir / "checkpoints"

        def is_time():
            is_saving = any(path.suffix == ".new" for path in checkpoints.glob("*"))
            done = job.num_steps() >= before + more
            return job.processes[0].poll() is not None or (done and (is_saving or not in_save))

        job.wait_for(is_time)
        has_ended = job.processes[0].poll() is not None
        job.processes[0].kill()
        job.codes()
        for step in job.saved():
            assert find_damage(checkpoints / str(step)) is None, f"{killed} kills, step {step}"
        assert not list(checkpoints.glob("*.damaged"))
    return not has_ended


def kill_and_go_on(folder, golden, num_kills, seed):
    rng, killed = np.random.default_rng(seed), 0
    while killed < num_kills and kill_once(folder, rng, killed):
        killed += 1
    with Job(folder, *OFTEN) as job:
        assert job.codes() == [0], job.outputs
    assert killed == num_kills
    assert_same_run(job, golden(*OFTEN))


@pytest.mark.slow
def test_a_run_that_is_killed_five_times_ends_as_one_that_was_not(folder, golden):
    kill_and_go_on(folder, golden, 5, seed=np.random.SeedSequence().entropy)


@pytest.mark.long
def test_a_run_that_is_killed_fifty_times_ends_as_one_that_was_not(folder, cache, golden):
    # 50 times up to 60 steps beyond what was measured before are more than the 2,000 there are.
    for seed in range(5):
        kill_and_go_on(make_folder(folder / str(seed), cache), golden, 10, seed)
