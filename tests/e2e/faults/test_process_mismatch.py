"""Processes that do not run the same thing say so before they meet, each with code 78."""

import contextlib
import os
import shutil
import time
from pathlib import Path

import pytest
from runs import ROOT

from faults.jobs import Job
from jddp.config.versions import versions

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def end(folder, **last):
    """The errors of both processes of a job, of which the last was given something else."""
    since = time.monotonic()
    with Job(folder, num_processes=2, **last) as job:
        assert job.codes() == [78, 78], job.outputs
    assert time.monotonic() - since < 60  # half of it is promised
    assert not job.saved()
    assert all("Traceback" not in complaint for _, complaint in job.outputs)
    return job.said(0), job.said(1)


def test_another_config_is_reported_by_its_key_and_each_other_difference_counted(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(ROOT / "jddp", other / "jddp")
    with (other / "jddp" / "zoo" / "losses.py").open("a") as file:
        file.write("# another\n")
    different = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true", "PYTHONPATH": str(other)}
    different["JAX_PLATFORMS"] = "rocm"  # which is not looked for: it is not there
    arguments = ["optimizer.learning_rate=0.5", "seed=7"]
    for said in end(folder, last_arguments=arguments, last_variables=different):
        assert "process 1 has another config or version than process 0: seed is 7 there" in said
        assert "and 0 here, and 4 more differ" in said  # the rate, flags, code and platform


def test_another_version_is_reported_by_the_package(folder, tmp_path):
    package = "jax"
    (facts := tmp_path / f"{package}-9.8.7.dist-info").mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.8.7\n")
    path = os.pathsep.join(map(str, (tmp_path, ROOT)))
    for said in end(folder, last_variables={"PYTHONPATH": path}):
        there = "process 1 has another config or version than process 0"
        assert f"{there}: {package} is 9.8.7 there and {versions()[package]} here. Give" in said


def test_another_model_is_reported_by_the_shape_of_a_parameter(folder):
    for said in end(folder, last_variables={"WIDTH": "9"}):
        assert "process 1 has another model, optimizer or batch than process 0" in said
        assert "(9,) float32 there and (8,) float32 here" in said


def test_a_process_without_devices_is_reported(folder):
    with Job(folder, num_processes=2, variables={"JAX_PLATFORMS": "rocm"}) as job:
        codes = job.codes()
    assert set(codes) <= {69, 81}, job.outputs
    assert 69 in codes
    _, said = job.outputs[codes.index(69)]
    assert said.startswith("jddp: JAX finds no device for JAX_PLATFORMS=rocm: ")
    assert said.count("\n") == 1


def listening(process):
    """Addresses on which a process listens, as the kernel has them."""
    held = set()
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            held.add(os.readlink(entry))
    files = [Path(f"/proc/{process.pid}/net/{name}") for name in ("tcp", "tcp6")]
    rows = [line.split() for file in files for line in file.read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held}


def test_a_job_on_one_host_listens_to_that_host_alone(folder):
    with Job(folder, num_processes=2) as job:
        job.wait_for_step(10)
        addresses = set().union(*map(listening, job.processes))
    assert addresses
    hosts = {address.partition(":")[0] for address in addresses}
    assert all(host.endswith("0100007F") for host in hosts), hosts  # also as one of IPv6
