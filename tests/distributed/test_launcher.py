"""A launch is supervised wherever its processes run, and shows all output but lines of gloo."""

import json
import os
import signal

from jddp.distributed.failure_file import VARIABLE, describe_failure
from jddp.distributed.group import without_gloo
from jddp.distributed.launcher import Failure, supervise
from jddp.ground.errors import ExitCode


class FakeRunner:
    """Processes that a signal stops while they run, and that then have failed or not."""

    def __init__(self, failure):
        self.failure = failure
        self.received = []

    def run(self, signals):
        with signals.received():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # at once: a repeat of the first
        self.received = signals.numbers
        return self.failure


def test_the_first_failure_of_a_runner_is_the_exit_code_and_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "failure.json"))
    runner = FakeRunner(Failure(describe_failure(3, ExitCode.DATA), "process 3 failed"))
    before = signal.getsignal(signal.SIGTERM)
    assert supervise(runner.run) == ExitCode.DATA
    assert runner.received == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == before
    assert json.loads((tmp_path / "failure.json").read_text())["process"] == 3
    assert supervise(FakeRunner(None).run) == ExitCode.DONE


GLOO = b"""\
[Gloo] Rank 0 is connected to 1 peer ranks.
[Gloo] Rank [Gloo] Rank 56 is connected to  is connected to 77 peers.
6 is connected to 7 peer ranks. Expected number is : 7

7 peer ranks. Expected number of connected peer ranks is : 7
Expected number of connected peer ranks is :\x20
7
"""  # as threads of several devices write parts of lines at once


def test_lines_of_gloo_are_dropped_and_others_keep_their_order():
    lines = [b"before\n", *GLOO.splitlines(keepends=True), b"inside\n", b"of C\n", b"after"]
    assert without_gloo(lines) == [b"before\n", b"inside\n", b"of C\n", b"after"]
    lines = [b"loss\n", b"7\n", b"\n"]  # of no gloo
    assert without_gloo(lines) == lines
