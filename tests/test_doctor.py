"""The doctor names what will make a job fail, and what mends it."""

import contextlib
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from runs import free_port

from jddp.distributed.identity import VARIABLES
from jddp.doctor import __main__ as doctor
from jddp.doctor import devices, host, job, links
from jddp.doctor.__main__ import main
from jddp.doctor.finding import Finding
from jddp.engine.mesh import make_mesh
from jddp.errors import FileSystemError


def levels(findings):
    return [finding.level for finding in findings]


# --- a host --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "addresses, level, told",
    [
        (["10.0.0.5"], "ok", "node-3 resolves to 10.0.0.5"),
        (["10.0.0.5", "127.0.1.1"], "ok", "10.0.0.5, 127.0.1.1"),
        (["127.0.1.1"], "warn", "127.0.1.1 alone"),
        (["::1"], "warn", "::1 alone"),
        ([], "warn", "resolves to no address"),
    ],
)
def test_a_name_that_leads_to_loopback_or_nowhere_is_reported(addresses, level, told):
    finding = host.check_name("node-3", addresses)
    assert finding.level == level
    assert told in finding.what
    assert ("JAX_COORDINATOR_ADDRESS" in finding.fix) == (level != "ok")


@pytest.mark.parametrize(
    "size, num_gpus, want",
    [(2**26, 0, []), (None, 4, []), (2**26, 1, ["warn"]), (2**26, 4, ["bad"]), (2**34, 4, ["ok"])],
)
def test_shared_memory_matters_where_there_are_gpus(size, num_gpus, want):
    assert levels(host.check_shared_memory(size, num_gpus)) == want


@pytest.mark.parametrize(
    "limit, links, want",
    [
        (2**16, [], []),
        (2**16, ["mlx5_0"], ["bad"]),
        (resource.RLIM_INFINITY, ["mlx5_0"], ["ok"]),
    ],
)
def test_locked_memory_matters_to_infiniband(limit, links, want):
    assert levels(host.check_locked_memory(limit, links)) == want


@pytest.mark.parametrize(
    "asked, is_there",
    [
        ("eth", True),
        ("=eth0", True),
        ("=eth", False),
        ("ib", False),
        ("ib,eth", True),
        ("^docker", True),
    ],
)
def test_interfaces_are_read_as_nccl_reads_them(asked, is_there):
    found = list(host.check_interfaces(["lo", "eth0"], [], {"NCCL_SOCKET_IFNAME": asked}))
    assert ("bad" in levels(found)) != is_there


def test_infiniband_that_is_turned_off_is_reported():
    assert levels(host.check_interfaces(["eth0"], ["mlx5_0"], {})) == ["ok", "ok"]
    off = host.check_interfaces(["eth0"], ["mlx5_0"], {"NCCL_IB_DISABLE": "1"})
    assert levels(off) == ["ok", "warn"]


def test_a_proxy_between_processes_is_reported():
    proxy = {"https_proxy": "http://proxy:3128"}
    assert levels(host.check_proxies(proxy)) == ["warn"]
    assert levels(host.check_proxies({**proxy, "no_proxy": "10.0.0.0/8"})) == []


# --- devices -------------------------------------------------------------------------------------

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}.54.14  Thu"


@pytest.mark.parametrize(
    "version, platform, runtime, want",
    [
        (None, "cpu", "", []),
        (550, "gpu", "cuda 12090", ["ok"]),
        (550, "gpu", "cuda 13000", ["bad"]),
        (580, "gpu", "cuda 13000", ["ok"]),
        (550, "cpu", "", ["bad"]),
        (470, "cpu", "", ["bad"]),
    ],
)
def test_a_driver_is_held_against_what_jax_runs_on(version, platform, runtime, want):
    told = DRIVER.format(version) if version else ""
    found = list(devices.check_driver(told, platform, runtime))
    assert levels(found) == want
    if platform == "cpu" and found:
        assert "jddp[cuda12]" in found[0].fix


@pytest.mark.parametrize(
    "gpus, tasks, want", [(1, "8", ["warn"]), (1, "8(x2)", ["warn"]), (8, "8", []), (1, "1", [])]
)
def test_a_task_that_is_cut_off_from_its_neighbours_gpus_is_reported(gpus, tasks, want):
    names = [f"nvidia{i}" for i in range(gpus)]
    environ = {"SLURM_TASKS_PER_NODE": tasks}
    assert levels(devices.check_peers(names, gpus, "gpu", environ)) == want


# --- a job ---------------------------------------------------------------------------------------


def test_another_version_is_reported_with_the_process_that_has_it():
    (found,) = job.compare_versions([{"jax": "0.10.2"}, {"jax": "0.10.2"}, {"jax": "0.11.0"}])
    assert found.level == "bad"
    assert "jax is 0.10.2, 0.11.0: process 2" in found.what


def test_clocks_that_are_apart_by_more_than_can_be_measured_are_reported():
    assert levels(job.compare_clocks([(0.2, 0.01), (-0.3, 0.01)])) == ["ok"]
    assert levels(job.compare_clocks([(4.0, 3.5)])) == ["ok"]  # nobody can tell
    (found,) = job.compare_clocks([(0.0, 0.01), (-90.0, 0.01)])
    assert "process 2 is 90.0 s behind" in found.what


def test_a_directory_that_not_all_see_is_reported(tmp_path):
    assert levels(job.compare_sight(tmp_path, [0.0, 0.4])) == ["ok"]
    (found,) = job.compare_sight(tmp_path, [0.0, None, 0.1, None])
    assert found.level == "bad"
    assert "process 1, 3 does not see" in found.what


NAMES = [f"process {i} on h{i}" for i in range(4)]


@pytest.mark.parametrize(
    "times, told",
    [
        ({(0, 1): 0.5}, []),
        ({(0, 1): 1e-4, (1, 2): 1e-3, (2, 0): 1e-4}, []),  # that is noise
        ({(0, 1): 4e-2, (1, 2): 1e-3, (2, 0): 4e-2}, ["process 0 on h0 takes 40.00 ms for 1 KiB"]),
        ({(0, 1): 1e-3, (1, 2): 4e-2, (2, 0): 4e-2}, ["process 2 on h2 takes 40.00 ms"]),
        (
            {(0, 1): 1e-3, (1, 2): 4e-2, (2, 3): 1e-3, (3, 0): 1e-3},
            ["the link from process 1 on h1 to process 2 on h2 takes 40.00 ms"],
        ),
    ],
)
def test_a_host_or_else_a_link_that_stands_out_is_reported(times, told):
    found = list(links.compare_links(times, NAMES, 1024))
    assert levels(found) == (["warn"] * len(told) or ["ok"])
    assert all(words in finding.what for words, finding in zip(told, found, strict=False))


def test_sums_over_the_devices_are_right_and_timed():
    table, (found,) = links.measure_all_reduce(make_mesh(4), sizes=(64, 4096))
    assert found.level == "ok"
    assert [x.size for x in table] == [64, 4096]
    assert all(x.bandwidth == pytest.approx(1.5 * x.size / x.seconds) for x in table)


def test_a_sum_that_is_wrong_is_reported(monkeypatch):
    monkeypatch.setattr(links.lax, "psum", lambda x, axis: x * 0.0)
    _, (found,) = links.measure_all_reduce(make_mesh(4), sizes=(64, 128))
    assert found.level == "bad"
    assert "64, 128 bytes" in found.what


def test_a_finding_fits_a_terminal():
    text = str(Finding("warn", "word " * 40, "another " * 20))
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("  warn  word")


# --- the door ------------------------------------------------------------------------------------


def test_one_process_is_examined(capsys, tmp_path):
    picture = tmp_path / "bandwidth.png"
    assert main(["--dir", str(tmp_path), "--plot", str(picture)]) == 0
    told = capsys.readouterr().out
    assert "one process: nothing to agree on" in told
    assert "8 cpu devices here" in told
    assert "GB/s" in told
    *lines, last = told.splitlines()
    assert max(map(len, lines)) <= 80
    assert last == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["bandwidth.png"]


@pytest.mark.processes
def test_processes_are_examined_together(tmp_path):
    port = free_port()

    def start(process):
        numbers = (f"127.0.0.1:{port}", "2", str(process))
        environ = {**os.environ, **dict(zip(VARIABLES, numbers, strict=True))}
        command = [
            sys.executable,
            "-m",
            "jddp.doctor",
            "--dir",
            str(tmp_path),
            "--num-devices",
            "2",
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=environ, **pipes)

    running = [start(process) for process in range(2)]
    ends = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], ends
    told = ends[0][0]
    for words in (
        "2 processes are connected",
        "clocks are within",
        "all see",
        "process 1: as process 0",
    ):
        assert words in told
    assert "1 KiB there and back: " in told
    assert "1024 KiB there and back: " in told
    assert list(tmp_path.iterdir()) == []


# --- the directory of runs -----------------------------------------------------------------------


def small_disk(path):
    """A disk of a megabyte, full."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], check=True)
    with contextlib.suppress(OSError), (path / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def told_of(directory):
    found = job.check_directory(directory)
    return {found.level: found}


def test_a_directory_that_can_be_written_is_reported_with_its_room_and_left_as_it_was(tmp_path):
    found = told_of(tmp_path)["ok"]
    assert re.search(rf"{tmp_path} can be written, [\d,.]+ GiB free", found.what)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_does_not_exist_is_reported_and_not_made(tmp_path):
    found = told_of(tmp_path / "rusn" / "x")["warn"]
    assert f"{tmp_path}/rusn/x does not exist" in found.what
    assert "mkdir" in found.fix
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_reported(tmp_path):
    small_disk(tmp_path)
    try:
        found = told_of(tmp_path)["bad"]
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
    assert f"{tmp_path} cannot be written: No space left on device" in found.what
    assert found.fix


def test_a_disk_with_little_room_is_reported(tmp_path, monkeypatch):
    room = os.statvfs(tmp_path)
    few = os.statvfs_result((*room[:4], 2**20 // room.f_frsize, *room[5:]))
    monkeypatch.setattr("os.statvfs", lambda _: few)
    assert "0.0 GiB free" in told_of(tmp_path)["warn"].what


def test_a_directory_that_is_no_place_for_files_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("/proc", "/proc/self/nothing", "/dev/null/x", tmp_path / "file" / "runs"):
        assert f"{name} cannot be written: " in told_of(Path(name))["bad"].what


def test_a_picture_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(FileSystemError, match=r"nowhere/x\.png cannot be written: No such file"):
        doctor._plot([links.Exchange(64, 0.1, 1e3)], tmp_path / "nowhere" / "x.png")
