"""Limits of phases, and which process is to blame."""

import logging
import os

import pytest
from runs import wait_until

from jddp.distributed import apart
from jddp.distributed.watchdog import Limits, Watchdog, describe_hang


def at(step, phase="step", seconds=200.0):
    return {"host": "node", "phase": phase, "step": step, "seconds": seconds}


def test_the_process_that_is_behind_or_silent_is_blamed():
    of_one = "process 0 on node is in phase step after step 7 for 200 s; the limit is 120 s."
    for progress, process, reported in (
        ({0: at(7)}, 0, of_one),
        ({0: at(7), 1: at(6)}, 1, "process 1 on node is in phase step after step 6"),
        ({0: at(7), 1: at(6)}, 1, "s. Process 0: step after step 7, for 200 s."),
        ({0: at(7, seconds=199), 1: at(7)}, 1, "process 1 on node"),
        ({0: at(7), 1: None, 2: at(7)}, 1, "process 1 does not answer; process 0 on node"),
        ({0: at(9, "evaluation"), 1: at(9, "save", 300)}, 1, "process 1 on node is in phase save"),
    ):
        blamed, text = describe_hang(progress, Limits(), 0.0)
        assert blamed == process
        assert reported in text


def test_a_step_may_take_thirty_times_the_longest_and_two_minutes():
    assert Limits().of("step", 0.01) == 120
    assert Limits().of("step", 10.0) == 300
    assert Limits(step_seconds=5).of("step", 10.0) == 5
    assert Limits().of("save", 10.0) == 3600


def test_only_a_process_that_hangs_is_reported_with_stacks_and_a_user_s_not_ended(tmp_path, caplog):
    with Watchdog(Limits(), tmp_path / "stacks") as watchdog:
        watchdog.enter("step", 1)
    assert list(tmp_path.iterdir()) == []
    stacks = tmp_path / "logs" / "stacks"
    caplog.set_level(logging.ERROR, logger="jddp")
    with Watchdog(Limits(step_seconds=0.1), stacks) as watchdog:
        watchdog.enter("step", 3)
        wait_until(lambda: caplog.records)
    (record,) = caplog.records
    assert "process 0 on " in record.getMessage()
    assert "is in phase step after step 3" in record.getMessage()
    assert "test_watchdog.py" in stacks.read_text()


def test_a_program_that_does_not_end_keeps_nobody_from_exiting(tmp_path, monkeypatch):
    monkeypatch.setattr(apart, "END_SECONDS", 0.1)
    written = f"open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}.')"
    (tmp_path / "program.py").write_text(f"import os, time\n{written}\ntime.sleep(1000)\n")
    monkeypatch.setattr(apart, "__file__", str(tmp_path / "program.py"))
    with apart.started_apart("silence"):
        wait_until(lambda: (tmp_path / "pid").exists() and "." in (tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()[:-1]), 0)
