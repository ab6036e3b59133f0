"""A loop of your own is killed, and ends as one that nothing disturbed."""

import json
import subprocess
import sys

import pytest
from runs import ROOT, environment

pytestmark = pytest.mark.processes


def start(directory):
    command = [sys.executable, ROOT / "examples" / "own_loop.py", directory]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)


def end_of(directory):
    """The digest of every array of the last state, and what was saved beside it."""
    last = directory / "200"
    return (last / "arrays.json").read_text(), json.loads((last / "run.json").read_text())["extra"]


def test_a_loop_that_is_killed_ends_bitwise_identical(tmp_path):
    with start(tmp_path / "killed") as process:
        assert any(said.startswith("step 120") for said in process.stdout)
        process.kill()  # while a state is being copied or written
    for name in ("killed", "undisturbed"):
        with start(tmp_path / name) as process:
            first = process.stdout.readline()
            process.stdout.read()
        assert process.returncode == 0
        assert first.startswith("resumed from step 1" if name == "killed" else "step 10:")
    assert end_of(tmp_path / "killed") == end_of(tmp_path / "undisturbed")
