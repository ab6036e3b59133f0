"""A command continues without a standard output or standard error that breaks."""

import os
import subprocess
import sys

import pytest
from runs import ROOT
from sweeps import swept

from jddp.distributed.command import run_command
from jddp.ground.errors import ConfigError

PROGRAM = """
import os, sys
from jddp.distributed.command import run_command

def run():
    kept = os.open("kept", os.O_CREAT | os.O_WRONLY)  # which must not become a standard stream
    for i in range(20_000):
        print("line", i, flush=i % 2 == 0)
        print("reported", i, file=sys.stderr)
    sys.stdout.write("caf\\u00e9")
    os.write(kept, b"whole")
    with open("ended", "w") as file:
        file.write("yes")
    return 3

sys.exit(run_command(run))
"""
BROKEN = {
    "head": "| head -n 1",
    "a full disk": ">/dev/full 2>/dev/full",
    "closed": ">&- 2>&-",
    "all closed": "<&- >&- 2>&-",
    "closed output": ">&-",
    "a pipe for errors": "2>&1 >/dev/null | head -n 1",
    "a locale without é": ">/dev/null",
}


@pytest.mark.parametrize("unbuffered", ["", "-u"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("redirection", swept(BROKEN, every=3))
def test_a_command_goes_on_without_a_stream_that_breaks(tmp_path, redirection, unbuffered):
    (tmp_path / "program.py").write_text(PROGRAM)
    line = f"{sys.executable} {unbuffered} program.py {redirection}"
    command = ["bash", "-c", line + '; echo "${PIPESTATUS[0]}" >code']
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    variables |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True)
    for name, want in {"code": "3\n", "ended": "yes", "kept": "whole"}.items():
        assert (tmp_path / name).read_text() == want
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr


def test_a_mistake_is_told_after_the_streams_are_put_back():
    before = sys.stdout, sys.stderr

    def run():
        raise ConfigError("a mistake")

    assert run_command(run) == 2
    assert (sys.stdout, sys.stderr) == before
