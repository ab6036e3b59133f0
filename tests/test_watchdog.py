"""Limits of phases, and which process is to blame."""

import logging
import time

import pytest

from jddp.cluster.watchdog import Limits, Watchdog, describe


def at(step, phase="step", seconds=200.0):
    return {"host": "node", "phase": phase, "step": step, "seconds": seconds}


@pytest.mark.parametrize(
    "progress, told",
    [
        ({0: at(7)}, "process 0 on node is in phase step after step 7 for 200 s, where 120 s are"),
        ({0: at(7), 1: at(6)}, "process 1 on node is in phase step after step 6"),
        ({0: at(7), 1: at(6)}, "limit. Process 0: step after step 7, for 200 s."),
        ({0: at(7, seconds=199), 1: at(7)}, "process 1 on node"),
        ({0: at(7), 1: None, 2: at(7)}, "process 1 does not answer; process 0 on node"),
        ({0: at(9, "evaluation"), 1: at(9, "save", 300)}, "process 1 on node is in phase save"),
    ],
)
def test_the_process_that_is_behind_or_silent_is_blamed(progress, told):
    assert told in describe(progress, Limits(), 0.0)


def test_a_step_may_take_thirty_times_the_longest_and_two_minutes():
    assert Limits().of("step", 0.01) == 120
    assert Limits().of("step", 10.0) == 300
    assert Limits(step_seconds=5).of("step", 10.0) == 5
    assert Limits().of("save", 10.0) == 3600


def test_only_steps_are_learned_from(monkeypatch):
    times = iter([0, 10, 500, 501, 600, 700])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    watchdog = Watchdog(Limits(), None)
    for phase in ("compile", "step", "step", "save", "step"):
        watchdog.enter(phase, 0)
    assert watchdog._longest_step == 1


def test_a_process_of_somebody_s_own_is_told_and_not_ended(tmp_path, caplog):
    stacks = tmp_path / "logs" / "stacks"
    with (
        caplog.at_level(logging.ERROR, logger="jddp"),
        Watchdog(Limits(step_seconds=0.1), stacks) as watchdog,
    ):
        watchdog.enter("step", 3)
        until = time.monotonic() + 30
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.01)
    (record,) = caplog.records
    assert "process 0 on " in record.getMessage()
    assert "is in phase step after step 3" in record.getMessage()
    assert "test_watchdog.py" in stacks.read_text()


def test_a_run_in_which_nothing_hangs_leaves_no_stacks(tmp_path):
    with Watchdog(Limits(), tmp_path / "stacks") as watchdog:
        watchdog.enter("step", 1)
    assert list(tmp_path.iterdir()) == []
