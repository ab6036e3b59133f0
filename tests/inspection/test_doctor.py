"""The doctor names what will make a job fail, and what mends it."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from runs import environment, of_job

from jddp.commands.checks import doctor_command as main
from jddp.distributed import gpus
from jddp.distributed.failure_file import VARIABLE, describe_failure, write_failure
from jddp.distributed.gpus import Missing
from jddp.engine.mesh import make_mesh
from jddp.inspection import doctor
from jddp.inspection.doctor import Finding


def levels(findings):
    return [finding.level for finding in findings]


def test_a_name_that_leads_to_loopback_or_nowhere_is_reported():
    for addresses, level in ((["10.0.0.5", "127.0.1.1"], "ok"), (["::1"], "warn"), ([], "warn")):
        finding = doctor.check_name("node-3", addresses)
        assert finding.level == level
        assert ("JAX_COORDINATOR_ADDRESS" in finding.fix) == (level != "ok")


def test_shared_memory_matters_where_there_are_gpus(monkeypatch):
    small = 2**26
    cases = (small, 0, []), (small, 1, ["warn"]), (small, 4, ["bad"]), (0, 4, ["bad"])
    for size, num_gpus, want in (*cases, (2**34, 4, ["ok"])):
        monkeypatch.setattr(doctor.os.path, "isdir", lambda path, size=size: size > 0)
        found = SimpleNamespace(total=size)
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path, found=found: found)
        assert levels(doctor.check_shared_memory(num_gpus)) == want


def test_mixed_devices_and_a_plugin_without_a_gpu_are_reported_and_chosen_cpus_are_not(monkeypatch):
    missing = Missing("JAX's plugin cuda12 is installed, but no driver for it.", "Do")
    count, found = doctor.check_devices(missing)
    assert (count.level, found.level) == ("ok", "bad")
    assert found.what.endswith(missing.what)
    assert levels(doctor.check_devices()) == ["ok"]
    kinds = ["H100"] * 4 + ["T400"]
    mixed = [SimpleNamespace(platform="tpu", device_kind=kind) for kind in kinds]
    monkeypatch.setattr(jax, "local_devices", lambda: mixed)
    monkeypatch.setattr(jax, "devices", lambda: mixed)
    _, found = doctor.check_devices()
    assert (found.level, "4 x H100 and 1 x T400" in found.what) == ("warn", True)


def test_another_version_and_a_directory_not_all_see_are_reported(tmp_path):
    (found,) = doctor.compare_versions([{"jax": "0.10.2"}, {"jax": "0.10.2"}, {"jax": "0.11.0"}])
    assert (found.level, "jax is 0.10.2, 0.11.0: process 2" in found.what) == ("bad", True)
    assert levels(doctor.compare_sight(tmp_path, [0.0, 0.4])) == ["ok"]
    (found,) = doctor.compare_sight(tmp_path, [0.0, None, 0.1, None])
    assert (found.level, "process 1, 3 does not see" in found.what) == ("bad", True)


def test_sums_over_the_devices_are_right_and_timed_and_a_wrong_one_is_reported(monkeypatch):
    table, (found,) = doctor.measure_all_reduce(make_mesh(4), sizes=(64, 4096))
    assert found.level == "ok"
    assert [x.size for x in table] == [64, 4096]
    assert all(x.bandwidth == pytest.approx(1.5 * x.size / x.seconds) for x in table)
    monkeypatch.setattr("jax.lax.psum", lambda x, axis: x * 0.0)
    _, (found,) = doctor.measure_all_reduce(make_mesh(4), sizes=(64, 128))
    assert found.level == "bad"
    assert "64, 128 bytes" in found.what


@pytest.mark.slow
def test_one_process_is_examined(capsys, tmp_path, monkeypatch):
    preallocate = "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.setenv(preallocate, "")  # so that it is as before in the end
    monkeypatch.delenv(preallocate)
    assert main(["--dir", str(tmp_path)]) == 0
    assert os.environ[preallocate] == "false"  # a job may need the memory
    text = capsys.readouterr().out
    for part in ("one process: nothing to compare", "8 cpu devices here", "GB/s"):
        assert part in text
    text += str(Finding("warn", "word " * 40, "another " * 20))
    assert max(map(len, text.splitlines())) <= 80
    assert not [*tmp_path.iterdir()]


@pytest.mark.processes
def test_processes_are_examined_together(tmp_path):
    command = [sys.executable, "-m", "jddp", "doctor", "--dir", tmp_path, "--num-devices", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, env=own | environment(), **pipes) for own in of_job()]
    (text, _), errors = (x.communicate(timeout=120) for x in running)
    assert [process.returncode for process in running] == [0, 0], errors
    for words in ("2 processes are connected", "all see", "1: same as process 0"):
        assert words in text
    assert list(tmp_path.iterdir()) == []


def test_the_first_failures_of_a_run_or_of_a_launch_are_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} has no first failure\n"
    known = {"host": "n1", "step": 7, "phase": "step", "time": "2026-11-23T15:26:26+00:00"}
    (tmp_path / "logs").mkdir()
    kept = [tmp_path / "logs" / "failure.json", tmp_path / "failure_a1.json", tmp_path / "of-pod"]
    for number, path in enumerate(kept):
        write_failure(describe_failure(number, 65, ValueError("damaged"), **known), path)
    (tmp_path / "logs" / "failure_a2.json").write_text("{")
    monkeypatch.setenv(VARIABLE, str(kept[2]))
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for number, path in enumerate(kept):
        assert f"{path}\n  process {number} on n1 failed first, with exit code 65: Value" in text
    assert text.count("in phase step after step 7\n") == 3
    assert main([str(tmp_path / "absent")]) == 74
    assert "absent is not a folder" in capsys.readouterr().err


def test_the_memory_of_the_smallest_gpu_is_known_where_the_program_answers(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    for script, size in (("printf '81559\\n40960\\n[N/A]\\n'", 40960 * 2**20), ("exit 9", None)):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert gpus.smallest_bytes() == size
    program.unlink()
    assert gpus.smallest_bytes() is None
