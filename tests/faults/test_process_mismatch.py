"""Processes that do not run the same thing say so before they meet, each with code 78."""

import contextlib
import os
import shutil
import time
from pathlib import Path

import pytest
from runs import REPOSITORY

from faults.jobs import Job

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def end(folder, **last):
    """What both processes of a job say, of which the last was given something else."""
    since = time.monotonic()
    with Job(folder, num_processes=2, **last) as job:
        codes = job.codes()
    assert codes == [78, 78], job.outputs
    assert time.monotonic() - since < 60  # half of it is promised
    assert not job.saved()
    assert all("Traceback" not in complaint for _, complaint in job.outputs)
    first, second = (" ".join(complaint.split()) for _, complaint in job.outputs)
    return first, second


def test_another_config_is_reported_by_its_key(folder):
    for said in end(folder, last_arguments=["seed=7", "optimizer.learning_rate=0.5"]):
        assert "process 1 has another config or version than process 0: seed is 7 there" in said
        assert "and 0 here, and 1 more differ" in said


def test_other_flags_of_the_compiler_are_reported(folder):
    flag = "--xla_cpu_enable_fast_math=true"
    for said in end(folder, last_variables={"XLA_FLAGS": flag}):
        assert f"XLA_FLAGS is {flag} there" in said


def test_other_code_is_reported(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(REPOSITORY / "jddp", other / "jddp")
    with (other / "jddp" / "zoo" / "losses.py").open("a") as file:
        file.write("# another\n")
    for said in end(folder, last_variables={"PYTHONPATH": str(other)}):
        assert "code of jddp is " in said


def test_another_model_is_reported_by_the_shape_of_a_parameter(folder):
    for said in end(folder, last_variables={"WIDTH": "9"}):
        assert "process 1 has another model, optimizer or batch than process 0" in said
        assert "(9,) float32 there and (8,) float32 here" in said


def test_a_process_of_another_job_is_reported(folder):
    for said in end(folder, variables={"JDDP_JOB": "a"}, last_variables={"JDDP_JOB": "b"}):
        assert "process 1 has another job than process 0: JDDP_JOB is b there and a here" in said


def test_a_process_that_would_compute_on_something_else_is_reported(folder):
    for said in end(folder, last_variables={"JAX_PLATFORMS": "rocm"}):
        assert "JAX_PLATFORMS is rocm there and cpu here" in said


def test_a_process_without_devices_is_reported(folder):
    with Job(folder, num_processes=2, variables={"JAX_PLATFORMS": "rocm"}) as job:
        codes = job.codes()
    assert set(codes) <= {69, 81}, job.outputs
    assert 69 in codes
    first = codes.index(69)
    assert job.outputs[first][1].startswith("jddp: JAX finds no device for JAX_PLATFORMS=rocm: ")
    assert job.outputs[first][1].count("\n") == 1


def test_another_heartbeat_is_reported(folder):
    for said in end(folder, last_variables={"JDDP_HEARTBEAT_SECONDS": "60"}):
        assert "JDDP_HEARTBEAT_SECONDS is 60 there and 100 here" in said


def listening(process):
    """Addresses on which a process listens, as the kernel has them."""
    held = set()
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            held.add(os.readlink(entry))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{process.pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held}


def test_a_job_on_one_host_listens_to_that_host_alone(folder):
    with Job(folder, num_processes=2) as job:
        job.wait_for(lambda: job.num_steps() >= 10)
        addresses = set().union(*map(listening, job.processes))
    assert addresses
    hosts = {address.partition(":")[0] for address in addresses}
    assert all(host.endswith("0100007F") for host in hosts), hosts  # also as one of IPv6
