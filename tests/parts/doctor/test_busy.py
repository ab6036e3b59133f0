"""The doctor lists what runs on the GPUs of a host, from a program that is a fake."""

import os
import sys

import pytest

from jddp.distributed import gpus
from jddp.inspection.machine import check_busy

GPUS = """\
GPU-a, NVIDIA H100 80GB HBM3, 12, 81559
GPU-b, NVIDIA H100 80GB HBM3, 70000, 81559
GPU-c, NVIDIA H100 80GB HBM3, 30000, 81559
GPU-d, NVIDIA H100 MIG, [N/A], [N/A]
"""
PROGRAMS = "GPU-b, 4242, python\nGPU-b, 4243, [Not Found]\n"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs an `nvidia-smi` that prints these lines, by the beginning of its argument."""

    def make(answers, code=0):
        program = tmp_path / "nvidia-smi"
        lines = [f"#!{sys.executable}", "import sys", f"answers = {answers!r}"]
        lines += ["given = sys.argv[1].partition('=')[0]", "print(end=answers.get(given, ''))"]
        program.write_text("\n".join([*lines, f"sys.exit({code})"]))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


def test_gpus_in_use_are_listed_with_their_memory_and_programs(installed):
    installed({"--query-gpu": GPUS, "--query-compute-apps": PROGRAMS})
    first, second = check_busy()
    assert (first.level, second.level) == ("warn", "warn")
    assert first.what == (
        "GPU 1 (NVIDIA H100 80GB HBM3) is in use by python (4242), [Not Found] (4243): 70,000 of "
        "81,559 MiB."
    )
    assert second.what.startswith(
        "GPU 2 (NVIDIA H100 80GB HBM3) is in use by programs that are not"
    )
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in first.fix


def test_free_gpus_are_one_line_and_without_the_program_there_is_none(installed, monkeypatch):
    installed({"--query-gpu": GPUS.splitlines()[0]})
    (finding,) = check_busy()
    assert finding == ("ok", "1 GPUs, and no other program on them", "")
    assert gpus.smallest_bytes() == 81559 * 2**20
    installed({"--query-gpu": GPUS}, code=9)  # a driver that does not answer
    assert list(check_busy()) == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert list(check_busy()) == []
    assert gpus.smallest_bytes() is None
