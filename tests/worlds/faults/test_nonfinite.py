"""A batch that one process reads wrongly is skipped and reported by all."""

import json

import numpy as np
import pytest

from faults.jobs import Job

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_a_nan_in_the_rows_of_one_process_is_found_by_all(folder):
    options = ("ddp.skip_nonfinite=true", "train.max_consecutive_skips=4")
    with Job(folder, *options, num_processes=2) as job:
        job.wait_for_step(20)
        (folder / "nan-1").touch()
        assert job.codes() == [80, 80], job.outputs
    (evidence,) = (job.run_dir / "nonfinite").iterdir()
    report = json.loads((evidence / "report.json").read_text())
    assert (report["skipped_in_a_row"], report["metrics"]["skipped"]) == (4, 4)
    assert report["inputs_not_finite"] == [report["examples"][4]]  # the first of its four rows
    rows = [dict(np.load(evidence / f"process_{process}.npz")) for process in range(2)]
    assert [int(np.isnan(x["x"]).any(1).sum()) for x in rows] == [0, 1]
    for _, said in job.outputs:
        assert f"jddp: The loss is nan at step {report['step']}, the last of 4 in a row" in said
    assert not job.saved()
