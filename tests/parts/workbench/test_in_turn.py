"""Commands run one after the other, and a stop signal ends the one that runs and all later ones."""

import signal
import sys
import threading

from runs import wait_until

from jddp.errors import ExitCode
from jddp.workbench.in_turn import InTurn


def python(program):
    return [sys.executable, "-S", "-c", program]


def test_a_command_has_its_exit_code_and_the_streams_of_this_process(capfd):
    with InTurn() as turns:
        assert turns.run(python("print('here'); raise SystemExit(7)")) == 7
        assert turns.run(python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")) == 137
        assert turns.run(python("")) == 0
    assert capfd.readouterr().out == "here\n"


def test_a_stop_signal_is_passed_on_and_no_later_command_is_begun(tmp_path):
    started = tmp_path / "started"
    program = (
        "import pathlib, signal, threading, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"pathlib.Path({str(started)!r}).touch()\n"
        "while True: signal.pause()"
    )

    def stop():
        wait_until(started.exists)
        signal.raise_signal(signal.SIGTERM)

    with InTurn() as turns:
        threading.Thread(target=stop).start()
        assert turns.run(python(program)) == 75
        assert turns.run(python("raise SystemExit(1)")) == ExitCode.PREEMPTED
