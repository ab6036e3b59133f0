"""The acceptance of GPUs: its parts, its page, and how it survives a part that fails."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from acceptance import equal, machine, measured, overlap, repeated, run, runs
from acceptance.jobs import Workload, cnn
from acceptance.page import page, verdict
from acceptance.part import read_result, write_result
from acceptance.parts import PARTS, Task
from acceptance.published import FIGURES, choose_figure, link_of, topology
from acceptance.result import SKIP, Machine, Part, PartResult
from runs import ROOT, environment, wait_until

from jddp.commands import doctor
from jddp.commands.doctor import main
from jddp.distributed import gpus
from jddp.inspection import doctor as links
from jddp.workbench.trace import DeviceTime
from jddp.zoo.losses import cross_entropy

ONE = Machine("gpu", 1, "NVIDIA H200")
GPUS, TWO = Machine("gpu", 8, "NVIDIA H200"), Machine("cpu", 2, "cpu")
ONE_GPU = "NVIDIA H100 80GB HBM3, 570.86.15, 81559 MiB, 700.00 W, 1980 MHz, 2619 MHz, "
ONE_GPU += "Enabled, Disabled, Default, 5, 16"
TOPOLOGY = """\
	\x1b[4mGPU0	GPU1	GPU2	NIC0	CPU Affinity	NUMA Affinity\x1b[0m
GPU0	 X 	NV18	{other}	PIX	0-47	0
GPU1	NV18	 X 	{other}	SYS	0-47	0
GPU2	{other}	{other}	 X 	SYS	48-95	1
NIC0	PIX	SYS	SYS	 X
"""
TABLE = TOPOLOGY.replace("\x1b[4m", "").replace("\x1b[0m", "")


def test_the_result_of_a_part_is_a_line_of_its_output():
    result = PartResult("warn", "slow", "faster", "| a |\n", {"kind": "x"})
    assert read_result(f"noise\n{write_result(result)}\nmore noise\n") == result
    assert read_result("Traceback: no result\n") is None


# --- what nvidia-smi reports ----------------------------------------------------------------------


def test_gpus_that_are_alike_stand_together_and_an_odd_one_alone():
    odd = ONE_GPU.replace("Default", "Exclusive_Process")
    lines = list(machine.digest([ONE_GPU, ONE_GPU, odd]))
    assert lines[0] == "nvidia-smi, GPU 0, 1"
    assert "  GPU                         NVIDIA H100 80GB HBM3" in lines
    assert lines[len(machine.FIELDS) + 1] == "nvidia-smi, GPU 2"
    modes = [line.split()[-1] for line in lines if "compute mode" in line]
    assert modes == ["Default", "Exclusive_Process"]
    assert max(map(len, lines)) <= 80


def test_the_machine_is_described_from_what_nvidia_smi_prints(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    answers = {
        "--query-gpu=name": ONE_GPU,
        "-q": "CUDA Version    : 12.8",
        "topo": TOPOLOGY.format(other="NV18"),
    }
    lines = [f"#!{sys.executable}", "import sys", f"answers = {answers!r}"]
    lines += ["print(answers.get(sys.argv[1].partition(',')[0], ''))"]
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = machine.find_devices(Machine("cpu"))
    assert (result.level, result.facts) == ("ok", {"num_devices": 8, "kind": "cpu"})
    for text in ("power limit                 700.00 W", "CUDA Version    : 12.8", "\tGPU0\tGPU1"):
        assert text in result.details
    assert link_of(topology()) == "NVLink"


def test_the_link_is_the_slowest_between_gpus_and_not_to_a_network_adapter():
    assert link_of(TABLE.format(other="NV4").splitlines()) == "NVLink"
    for other in ("PIX", "PHB", "SYS", "NODE"):
        assert link_of(TABLE.format(other=other).splitlines()) == "PCIe"
    assert link_of(["	GPU0	CPU Affinity", "GPU0	 X 	0-47"]) is None
    assert link_of([]) is None


def test_a_published_figure_is_chosen_by_gpu_and_link():
    assert choose_figure("NVIDIA H200", "NVLink").bandwidth == 442
    assert choose_figure("NVIDIA H200", None).bandwidth == 442
    assert choose_figure("NVIDIA H200", "PCIe") is None
    assert choose_figure("NVIDIA A100-SXM4-80GB", "NVLink").bandwidth == 231
    for kind in ("NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-40GB"):
        found = [choose_figure(kind, link) for link in ("NVLink", "PCIe", None)]
        assert [x and x.bandwidth for x in found] == [208, 20, None]
    assert choose_figure("NVIDIA H200 NVL", "NVLink") is None  # another card
    assert choose_figure("cpu", None) is None
    assert all(x.source.startswith("https://") for x in FIGURES)


# --- traces ---------------------------------------------------------------------------------------


def test_overlap_is_judged_by_both_settings():
    on = [DeviceTime(1, 0.8, 1e-4, 2e-5), DeviceTime(1, 0.8, 1e-4, 4e-5)]
    off = [DeviceTime(1, 0.8, 1e-4, 9.5e-5)]
    result = overlap.judge_overlap(on, off)
    assert result.level == "ok"
    assert result.what == "70% of the collectives beside kernels, 5% when off"
    assert "\n| on | 0.20 | 70% |\n| off | 0.10 | 5% |\n" in result.details
    assert overlap.judge_overlap(off, on).level == "warn"
    for nothing in ([], [DeviceTime(1, 1, 0, 0)]):
        assert overlap.judge_overlap(nothing, off).what == "the trace shows no collective"


# --- judgements -----------------------------------------------------------------------------------


def test_half_of_the_published_bandwidth_is_enough():
    row = choose_figure("NVIDIA H200", "NVLink")
    assert measured.judge_bandwidth(300, row).level == "ok"
    slow = measured.judge_bandwidth(200, row)
    assert (slow.level, slow.what) == ("warn", "200 GB/s; 442 GB/s are published for NVLink")
    assert measured.judge_bandwidth(1, None).level == "ok"


def test_a_wrong_sum_fails_whatever_the_bandwidth(monkeypatch):
    assert measured.bandwidth(TWO).level == "ok"
    monkeypatch.setattr(links.lax, "psum", lambda x, axis: x * 0.0)
    assert measured.bandwidth(TWO).level == "bad"


def test_scaling_warns_on_gpus_alone():
    assert measured.judge_scaling(7.5, GPUS).level == "ok"
    assert measured.judge_scaling(6.0, GPUS).level == "warn"
    assert measured.judge_scaling(0.9, TWO).level == "ok"


def test_a_peak_is_to_be_near_the_prediction():
    levels = [measured.judge_memory(100, peak).level for peak in (79, 80, 130, 131)]
    assert levels == ["warn", "ok", "ok", "warn"]
    assert measured.judge_memory(2**30, None) == (
        SKIP,
        "predicted 1.0 GiB; these devices have no memory statistics",
        "",
    )


def test_runs_of_a_step_must_agree_only_with_the_flag(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    assert repeated.judge_runs(0, 4).level == "ok"
    usual = repeated.judge_runs(3, 4)
    assert (usual.level, usual.what) == ("ok", "3 of 4 runs of a step differ from the first")
    assert "NCCL_NVLS_ENABLE=0" in usual.details
    monkeypatch.setenv("XLA_FLAGS", f"--xla_a=1 {repeated.FLAG}")
    assert repeated.judge_runs(0, 4).level == "ok"
    assert repeated.judge_runs(1, 4).level == "bad"


@pytest.mark.slow
def test_devices_that_equal_one_pass_and_others_fail(monkeypatch):
    two = jax.devices()[:2]
    monkeypatch.setattr(equal, "cnn", lambda _: cnn(TWO))
    monkeypatch.setattr(equal, "_verified", lambda job: verified(job))

    def verified(job):
        return equal.verify(job.model, equal.adam(), job.loss, job.batch, mesh=two)

    result = equal.parity(TWO)
    assert (result.level, result.what) == ("ok", "a step equals one device and the CPU")

    def own_mean(model, batch, train):  # an error of 1/2 of each gradient
        losses, metrics = cross_entropy(model, batch, train)
        return losses.sum() / 16, metrics

    monkeypatch.setattr(equal, "cnn", lambda _: Workload(cnn(TWO).model, own_mean, cnn(TWO).batch))
    assert equal.parity(TWO).level == "bad"


def test_the_last_arrays_of_a_run_are_those_of_its_newest_checkpoint(tmp_path):
    assert runs.last_arrays(tmp_path) == {}
    for step in (9, 10):
        folder = tmp_path / "checkpoints" / str(step)
        folder.mkdir(parents=True)
        (folder / "arrays.json").write_text(json.dumps({"step": {"sha256": str(step)}}))
    assert runs.steps_of(tmp_path) == [9, 10]
    assert runs.last_arrays(tmp_path) == {"step": {"sha256": "10"}}


# --- processes ------------------------------------------------------------------------------------


def test_parts_get_their_devices_and_flags_beside_those_that_are_set():
    made = run.environment({"XLA_FLAGS": "--xla_a=1"}, "cpu", 2)
    assert (made["JAX_PLATFORMS"], made["JAX_NUM_CPU_DEVICES"]) == ("cpu", "2")
    assert made["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    made = run.environment({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, "gpu", 8)
    assert made == {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    assert run.environment({"JAX_PLATFORMS": "cuda"}, "gpu", 8)["JAX_PLATFORMS"] == "cuda,cpu"


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
    hangs = "import subprocess, sys; c = 'import time; time.sleep(600)'\n"
    hangs += "child = subprocess.Popen([sys.executable, '-c', c])\n"
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


PARENT = """
import sys
from pathlib import Path
from jax._src import xla_bridge
from acceptance import run
run.PROGRAM = sys.argv[1]
code = run.accept(Path("page.md"), platform="gpu", num_devices=8)
assert not xla_bridge._backends
sys.exit(code)
"""


@pytest.mark.slow
def test_what_starts_the_parts_holds_no_device_and_a_bad_part_refuses_the_machine(tmp_path):
    facts = {"num_devices": 1, "kind": "NVIDIA H200"}
    line = write_result(PartResult("ok", "it is so", facts=facts))
    child = f"import sys; 'memory' in sys.argv and sys.exit('lost'); print({line!r})"
    command = [sys.executable, "-c", PARENT, child]
    environ = environment(PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}")
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 76, done.stderr
    assert done.stdout.endswith("\nRefused: Memory: page.md\n")
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("# GPU acceptance\n\n**Refused: Memory.**\n\n1 x NVIDIA H200, ")
    assert "\n| Parity | ok: it is so | 0 |\n" in text
    assert "\n| Scaling | skip: not tried: one device | 0 |\n" in text
    assert "\n## Memory\n\n`XLA_FLAGS=--xla_gpu_autotune_level=0`\n\n```text\nlost\n```\n" in text


@pytest.mark.slow
def test_without_a_gpu_one_line_has_the_reason(monkeypatch, tmp_path, capfd):
    file, earlier = tmp_path / "page.md", tmp_path / "earlier.md"
    earlier.write_text("an earlier page")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["--gpu-acceptance", str(file)]) == 69
    out, err = capfd.readouterr()
    assert out == ""
    assert err == (
        "jddp: --gpu-acceptance finds no GPU. JAX_PLATFORMS=cpu excludes them. --platform cpu "
        "tries the procedure without one.\n"
    )
    assert not file.exists()
    assert main(["--gpu-acceptance", str(earlier)]) == 69
    assert earlier.read_text() == "an earlier page"


def test_the_wheel_has_no_acceptance_and_says_where_it_is(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(doctor, "ACCEPTANCE", tmp_path / "gpu_acceptance.py")
    assert main(["--gpu-acceptance"]) == 2
    assert "--gpu-acceptance is a part of the repository" in capfd.readouterr().err


def test_what_is_missing_is_named_as_training_names_it(monkeypatch, tmp_path):
    for path in ("proc/driver/nvidia/version", "dev/null"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    driver = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu"
    (tmp_path / "proc/driver/nvidia/version").write_text(driver)
    monkeypatch.setattr(gpus, "ROOT", tmp_path)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(Exception, match=r"NVIDIA's driver is 570, but there is no /dev/nvidia"):
        machine.find_devices(Machine("gpu"))


# --- the page -------------------------------------------------------------------------------------


def part(title, level, what="it is so", **others):
    return Part(title, PartResult(level, what, **others), 2.4)


def test_the_verdict_is_one_sentence():
    good, slow, skipped = part("A", "ok"), part("B", "warn"), part("C", SKIP)
    assert verdict([good]) == "Accepted"
    assert verdict([good, slow]) == "Accepted with 1 warning: B"
    assert verdict([slow, slow, skipped]) == "Accepted with 2 warnings: B, B; without C"
    assert verdict([good, slow, part("D", "bad"), skipped]) == "Refused: D"


def test_the_page_begins_with_the_verdict_and_a_table_of_the_parts():
    parts = [part("Parity", "ok", details="as measured"), part("Memory", "warn", fix="less")]
    environ = {"NCCL_DEBUG": "INFO", "HOME": "/root", "XLA_FLAGS": "--xla_a=1"}
    text = page(parts, GPUS, environ)
    assert text.startswith("# GPU acceptance\n\n**Accepted with 1 warning: Memory.**\n")
    assert "8 x NVIDIA H200, 20" in text
    assert "\n| Parity | ok: it is so | 2 |\n" in text
    assert "\nNCCL_DEBUG=INFO\nXLA_FLAGS=--xla_a=1\n" in text
    assert "HOME" not in text
    assert text.endswith("\n## Parity\n\nas measured\n\n## Memory\n\nless\n")
    assert page(parts, TWO, {}).startswith(
        "# GPU acceptance on CPUs: a trial, not a result of GPUs\n"
    )


def accepted(tmp_path, num_devices):
    """The results on the page of a trial on so many virtual devices, by the titles of the parts."""
    file = tmp_path / "page.md"
    command = [sys.executable, "-m", "jddp", "doctor", "--gpu-acceptance", file]
    command += ["--platform", "cpu", "--num-devices", str(num_devices)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr + file.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]
    rows = re.findall(r"^\| (.+?) \| (\w+): (.+) \| \d+ \|$", file.read_text(), re.M)
    assert [title for title, _, _ in rows] == [task.title for task in PARTS.values()]
    return {title: (level, what) for title, level, what in rows}


@pytest.mark.long
@pytest.mark.processes
def test_the_acceptance_runs_on_two_virtual_devices_and_writes_its_page(tmp_path):
    results = accepted(tmp_path, 2)
    skipped = {title for title, (level, _) in results.items() if level == SKIP}
    assert skipped == {"Overlap", "Memory"}
    assert {level for level, _ in results.values()} == {"ok", SKIP}
    assert re.fullmatch(r"killed after step [36]0 and .+", results["Kill and resume"][1])
    assert "exit code 137, none left" in results["Kill of one process"][1]
    assert re.search(r"all-reduces of .+, [2-9] large", results["Scatter and large buckets"][1])


@pytest.mark.long
@pytest.mark.processes
def test_on_one_device_what_needs_several_is_not_tried(tmp_path):
    results = accepted(tmp_path, 1)
    tried = {title for title, (_, what) in results.items() if what != "not tried: one device"}
    assert tried == {task.title for task in PARTS.values() if not task.needs_several}
    assert results["Parity"] == ("ok", "a step equals the CPU")
