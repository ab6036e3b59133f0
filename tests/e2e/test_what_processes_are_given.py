"""Two processes of a job that were not given the same, or were given the same rows."""

import pytest
from runs import ROOT
from test_launch import Launched

REFUSED = [
    "num_steps is 30 there and 20 here",
    "eval_every_steps is 2 there and 1 here",
    "seed is 1 there and 0 here",
    "evaluate is given there and none here",
    "batches: seed is 1 there and 0 here",
    "batches: shuffle is False there and True here",
    "batches: num_examples is 56 there and 64 here",
    "batches: number of batches is 2 there and 1 here",
    *["batches= of processes 0 and 1 are the same: the first batch has the same rows on each"] * 2,
    *["evaluate= of processes 0 and 1 are the same: the first batch has the same rows on each"] * 2,
]


@pytest.mark.processes
@pytest.mark.slow
def test_what_processes_were_given_is_compared_before_the_first_step(tmp_path):
    script, two = ROOT / "tests" / "workers" / "given.py", ["--num-processes", 2]
    with Launched(tmp_path, *two, "--devices-per-process", 1, script) as launched:
        assert launched.end(150) == 0, launched.err
    for process in range(2):
        log = launched.log(process).splitlines()
        assert "a step was taken" not in log
        refused = [line for line in log if line.startswith("78 ")]
        assert len(refused) == len(REFUSED), log
        for line, words in zip(refused, REFUSED, strict=True):
            assert words in line
            assert "has another call of fit than process 0" in line or "same_batches=True" in line
        assert log.index("now all is well") < log.index("evaluated 30") < log.index("the end")
