"""Limits of phases, and which process is to blame."""

import logging
import os
import signal
import subprocess
import sys
import time

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


@pytest.fixture
def silent():
    """A process that does nothing, and what watches it, with its standard input."""
    watch = [sys.executable, apart.__file__, "silence"]
    sleeps = [sys.executable, "-c", "import time; print(flush=True); time.sleep(100)"]
    with (
        subprocess.Popen(sleeps, stdout=subprocess.PIPE) as process,
        subprocess.Popen([*watch, str(process.pid)], stdin=subprocess.PIPE, bufsize=0) as watches,
    ):
        process.stdout.read(1)
        yield process, watches
        process.kill()


@pytest.mark.processes
def test_a_process_that_is_silent_is_ended_but_not_while_it_is_stopped(silent):
    process, watches = silent
    process.send_signal(signal.SIGSTOP)
    watches.stdin.write(b"1\n")
    time.sleep(3)  # in which a running process is ended
    assert process.poll() is None
    process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=60) == -signal.SIGQUIT
    assert watches.wait(timeout=60) == 0


@pytest.mark.processes
def test_what_watches_a_process_ends_with_its_input_and_with_the_process(silent):
    process, watches = silent
    watches.stdin.close()
    assert watches.wait(timeout=60) == 0
    assert process.poll() is None
    gone = subprocess.run(
        [sys.executable, apart.__file__, "silence", "0"], input=b"1\n", timeout=60
    )
    assert gone.returncode == 0


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
