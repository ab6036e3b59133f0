"""A run resumes on other numbers of processes and devices."""

import numpy as np
import pytest
from runs import records

from faults.jobs import Job, assert_same_run
from jddp.checkpoint.reader import read_arrays

pytestmark = [pytest.mark.processes, pytest.mark.slow]
# No random numbers, and an optimizer that does not blow up the rounding of small gradients.
PLAIN = ["model.kwargs.dropout_rate=0.0", "optimizer.name=sgd", "checkpoint.every_steps=50"]
LOGICAL = ["ddp.strategy=logical_replicas", "ddp.strategy.number=8", "ddp.batch_norm=local"]
LOGICAL += PLAIN[2:]


@pytest.mark.parametrize("options", [LOGICAL, pytest.param(PLAIN, marks=pytest.mark.long)])
def test_a_run_resumes_equal_anywhere_and_with_logical_replicas_bitwise(folder, golden, options):
    """Killed on 8 devices, on 1, and on 4 of two processes; finished on 2."""
    for num_processes, num_devices, until in [(1, 8, 100), (1, 1, 250), (2, 4, 400), (1, 2, None)]:
        arguments = [*options, f"mesh.num_devices={num_devices}"]
        with Job(folder, *arguments, num_processes=num_processes) as job:
            if until is None:
                assert job.codes() == [0], job.outputs
                break
            job.wait_for_step(until)
            job.processes[0].kill()
            job.codes()
    want = golden(*options, "mesh.num_devices=8")
    if options == LOGICAL:
        assert_same_run(job, want)
        return
    for one, other in zip(records(job.run_dir), records(want.run_dir), strict=True):
        assert (one["step"], one.get("count")) == (other["step"], other.get("count"))
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-3)
    names = ["params", "ema_params", "model_state"]
    got, wanted = (read_arrays(x.run_dir / "checkpoints" / "1000", names) for x in (job, want))
    for name, value in wanted.items():  # sums of a thousand steps, each in another order
        np.testing.assert_allclose(got[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
