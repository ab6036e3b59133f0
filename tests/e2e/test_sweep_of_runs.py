"""A sweep that a signal stops resumes in the run that was stopped, by the same command."""

import signal
import subprocess
import sys

import pytest
from runs import environment, records, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_a_sweep_passes_a_signal_on_and_resumes(tmp_path):
    job = ["model.name=mlp", "mesh.num_devices=1", "train.num_steps=1000"]
    command = [sys.executable, "-m", "jddp.train", *job, f"run.dir={tmp_path / 'runs'}"]
    command += ["--sweep", "seed=0,1"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options = {"env": environment(XDG_CACHE_HOME=str(tmp_path / "cache")), **streams}
    first = tmp_path / "runs" / "seed=0"
    process = subprocess.Popen(command, **options)
    try:
        wait_until(lambda: records(first), process)
        process.send_signal(signal.SIGTERM)
        told = process.communicate(timeout=120)[0]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 75, told
    assert "SIGTERM: finishing this step" in told
    assert told.endswith("jddp: stopped at seed=0. The same command resumes.\n")
    assert not (tmp_path / "runs" / "seed=1").exists()
    resumed = subprocess.run(command, timeout=240, **options)
    assert resumed.returncode == 0, resumed.stdout
    assert "resumed from step" in resumed.stdout
    assert "mean of 2 seeds: 0." in resumed.stdout
    finished = records(first)
    again = subprocess.run(command, timeout=60, **options)
    assert "mean of 2 seeds: 0." in again.stdout
    assert records(first) == finished
