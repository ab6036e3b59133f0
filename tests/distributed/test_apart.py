import os
import signal

import pytest

from jddp.distributed import apart

READS = "import sys\nsys.stdin.read()\n"
IS_DEAF = "import sys, time\nsys.stdin.close()\ntime.sleep(1000)\n"


@pytest.mark.parametrize("program", [READS, IS_DEAF], ids=["stopped", "deaf"])
def test_a_program_that_does_not_run_keeps_nobody_from_exiting(tmp_path, monkeypatch, program):
    monkeypatch.setattr(apart, "END_SECONDS", 0.1)
    (tmp_path / "program.py").write_text(program)
    monkeypatch.setattr(apart, "__file__", str(tmp_path / "program.py"))
    started, popen = [], apart.subprocess.Popen

    def start(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(apart.subprocess, "Popen", start)
    with apart.started_apart("silence"):
        if program == READS:
            os.kill(started[0].pid, signal.SIGSTOP)
    assert started[0].returncode == -signal.SIGKILL


def test_a_program_that_runs_ends_by_itself(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(READS + f"open({str(tmp_path / 'end')!r}, 'w')\n")
    monkeypatch.setattr(apart, "__file__", str(tmp_path / "program.py"))
    with apart.started_apart("silence") as stdin:
        assert not stdin.closed
    assert (tmp_path / "end").exists()
