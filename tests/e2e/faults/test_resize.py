"""A run resumes on other numbers of processes and devices."""

import signal

import numpy as np
import pytest
from runs import records

from faults.jobs import Job, assert_same_run
from jddp.checkpoint.reader import read_arrays

pytestmark = [pytest.mark.processes, pytest.mark.slow]

# No random numbers, and an optimizer that does not blow up the rounding of small gradients.
PLAIN = ["model.kwargs.dropout_rate=0.0", "optimizer.name=sgd"]


def values(job):
    """Parameters and statistics of the last checkpoint."""
    path = job.run_dir / "checkpoints" / str(job.last_saved())
    return read_arrays(path, ["params", "ema_params", "model_state"])


@pytest.mark.long
def test_a_run_moves_from_two_processes_to_one_and_to_four(folder, golden):
    for num_processes, num_devices, until in [(2, 2, 100), (1, 1, 300), (4, 4, None)]:
        arguments = [*PLAIN, f"mesh.num_devices={num_devices}"]
        with Job(folder, *arguments, num_processes=num_processes) as job:
            if until is not None:
                job.wait_for_step(until)
                job.processes[-1].send_signal(signal.SIGTERM)
            code = 0 if until is None else 75
            assert job.codes() == [code] * num_processes, job.outputs
        said = " ".join(job.outputs[0][0].split())
        if num_processes > 1 and until is None:
            assert "num_processes 1 -> 4, num_devices 1 -> 4: finished steps" in said
    want = golden(*PLAIN)
    got, wanted = values(job), values(want)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        # Sums of a thousand steps, each in another order.
        np.testing.assert_allclose(got[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    for one, other in zip(records(job.run_dir), records(want.run_dir), strict=True):
        assert (one["step"], one.get("count")) == (other["step"], other.get("count"))
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-3)


SHARDS = [
    "ddp.strategy=logical_replicas",
    "ddp.strategy.number=8",
    "ddp.batch_norm=local",
    "checkpoint.every_steps=50",
]


def test_logical_shards_resume_bitwise_identically_wherever_they_are_carried(folder, golden):
    """Killed on 8 devices, on 1, and on 4 of two processes; finished on 2."""
    for num_processes, num_devices, until in [(1, 8, 100), (1, 1, 250), (2, 4, 400), (1, 2, None)]:
        arguments = [*SHARDS, f"mesh.num_devices={num_devices}"]
        with Job(folder, *arguments, num_processes=num_processes) as job:
            if until is None:
                assert job.codes() == [0], job.outputs
                break
            job.wait_for_step(until)
            job.processes[0].kill()
            job.codes()
    assert_same_run(job, golden(*SHARDS, "mesh.num_devices=8"))
