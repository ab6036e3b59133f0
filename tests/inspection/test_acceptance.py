"""The acceptance of GPUs: its parts, its page, and how it survives a part that fails."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from acceptance import measured, overlap, repeated, run
from acceptance.page import verdict
from acceptance.part import write_result
from acceptance.parts import PARTS, Task
from acceptance.published import choose_figure
from acceptance.result import SKIP, Machine, Part, PartResult
from runs import environment, wait_until

from jddp.commands import checks
from jddp.commands.checks import doctor_command as main
from jddp.workbench.trace import DeviceTime

ONE = Machine("gpu", 1, "NVIDIA H200")
GPUS, TWO = Machine("gpu", 8, "NVIDIA H200"), Machine("cpu", 2, "cpu")


def test_figures_are_judged_by_their_bounds(monkeypatch):
    row = choose_figure("NVIDIA H200", "NVLink")
    assert choose_figure("NVIDIA H200", "PCIe") is None
    assert choose_figure("NVIDIA H200 NVL", "NVLink") is None  # another card
    on = [DeviceTime(1, 0.8, 1e-4, 2e-5), DeviceTime(1, 0.8, 1e-4, 4e-5)]
    off = [DeviceTime(1, 0.8, 1e-4, 9.5e-5)]
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    for results, levels in (
        ([measured.judge_bandwidth(x, row) for x in (300, 200)], ["ok", "warn"]),
        ([measured.judge_scaling(x, GPUS) for x in (7.5, 6.0)], ["ok", "warn"]),
        ([measured.judge_bandwidth(1, None), measured.judge_scaling(0.9, TWO)], ["ok", "ok"]),
        ([measured.judge_memory(100, x) for x in (79, 80, 131)], ["warn", "ok", "warn"]),
        ([measured.judge_memory(2**30, None)], [SKIP]),
        ([repeated.judge_runs(3, 4)], ["ok"]),
        ([overlap.judge_overlap(on, off), overlap.judge_overlap(off, on)], ["ok", "warn"]),
    ):
        assert [x.level for x in results] == levels, results
    monkeypatch.setenv("XLA_FLAGS", f"--xla_a=1 {repeated.FLAG}")
    assert [repeated.judge_runs(x, 4).level for x in (0, 1)] == ["ok", "bad"]


def started(monkeypatch, program, **options):
    """The result of a part whose process runs this program of Python."""
    monkeypatch.setattr(run, "PROGRAM", program)
    monkeypatch.setitem(PARTS, "test", Task("A test", lambda _: None, **options))
    return run.run_part("test", ONE, environment(XLA_FLAGS="--xla_a=1"))


def test_a_part_that_dies_or_hangs_is_bad_with_the_end_of_its_output(monkeypatch):
    dies = "import os, sys; print('a'); print('last words', flush=True); os._exit(7)"
    part = started(monkeypatch, dies, seconds=60)
    assert (part.result.level, part.result.what) == ("bad", "ended with exit code 7")
    assert "last words" in part.result.details
    hangs = "import subprocess; child = subprocess.Popen(['sleep', '600'])\n"
    hangs += "print('child', child.pid, flush=True); child.wait()"
    part = started(monkeypatch, hangs, seconds=2)
    assert (part.result.level, part.result.what) == ("bad", "exceeded 2 s")
    (child,) = re.findall(r"child (\d+)", part.result.details)
    wait_until(lambda: not is_running(child))  # it was killed with the part


def is_running(pid):
    path = Path("/proc", pid, "stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_part_has_its_own_variables_and_its_flags_after_those_of_the_user(monkeypatch):
    line = write_result(PartResult("ok", "FLAGS"))
    program = f"import os; print({line!r}.replace('FLAGS', os.environ['XLA_FLAGS']))"
    part = started(monkeypatch, program, seconds=60, environ={"XLA_FLAGS": "--xla_b=2"})
    assert part.result[:2] == ("ok", "--xla_a=1 --xla_b=2")
    assert part.result.details == "`XLA_FLAGS=--xla_b=2`"
    monkeypatch.setitem(PARTS, "test", Task("A test", lambda _: None, 60, needs_several=True))
    part = run.run_part("test", ONE, {})
    assert part == ("A test", PartResult(SKIP, "not tried: one device"), 0.0)


@pytest.mark.slow
def test_without_a_gpu_one_line_has_the_reason(monkeypatch, tmp_path, capfd):
    file, earlier = tmp_path / "page.md", tmp_path / "earlier.md"
    earlier.write_text("an earlier page")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for path in (file, earlier):
        assert main(["--gpu-acceptance", str(path)]) == 69
        assert "JAX_PLATFORMS=cpu excludes them. --platform cpu" in capfd.readouterr().err
    assert (file.exists(), earlier.read_text()) == (False, "an earlier page")


def test_the_wheel_has_no_acceptance_and_says_where_it_is(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(checks, "ACCEPTANCE", tmp_path / "gpu_acceptance.py")
    assert main(["--gpu-acceptance"]) == 2
    assert "--gpu-acceptance is a part of the repository" in capfd.readouterr().err


def test_the_verdict_is_one_sentence():
    levels = {"A": "ok", "B": "warn", "C": SKIP, "D": "bad"}
    good, slow, skipped, bad = (Part(x, PartResult(y, ""), 2.4) for x, y in levels.items())
    assert verdict([good]) == "Accepted"
    assert verdict([slow, slow, skipped]) == "Accepted with 2 warnings: B, B; without C"
    assert verdict([good, slow, bad, skipped]) == "Refused: D"


@pytest.mark.long
@pytest.mark.processes
def test_the_acceptance_runs_on_two_virtual_devices_and_writes_its_page(tmp_path):
    file = tmp_path / "page.md"
    command = [sys.executable, "-m", "jddp", "doctor", "--gpu-acceptance", file]
    command += ["--platform", "cpu", "--num-devices", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr + file.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]
    rows = re.findall(r"^\| (.+?) \| (\w+): (.+) \| \d+ \|$", file.read_text(), re.M)
    assert [title for title, _, _ in rows] == [task.title for task in PARTS.values()]
    results = {title: (level, what) for title, level, what in rows}
    skipped = {title for title, (level, _) in results.items() if level == SKIP}
    assert skipped == {"Overlap", "Memory"}
    assert {level for level, _ in results.values()} == {"ok", SKIP}
    assert re.fullmatch(r"killed after step [36]0 and .+", results["Kill and resume"][1])
    assert "exit code 137, none left" in results["Kill of one process"][1]
    assert re.search(r"all-reduces of .+, [2-9] large", results["Scatter and large buckets"][1])
