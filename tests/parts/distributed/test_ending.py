"""A process knows the exit code with which it ends, where Python lets it."""

import subprocess
import sys

import pytest
from runs import environment

PROGRAM = """
import atexit
import sys

from jddp.distributed.ending import exit_code, note_exits

note_exits()
atexit.register(lambda: print(exit_code()))


def main():
    {}


main()
"""


@pytest.mark.parametrize(
    "end, code, known",
    [
        ("pass", 0, "0"),
        ("sys.exit()", 0, "0"),
        ("sys.exit(3)", 3, "3"),
        ("sys.exit(-1)", 255, "255"),
        ("sys.exit('a reason')", 1, "1"),
        ("raise SystemExit(3)", 3, "None"),
        ("exec('try: sys.exit(3)\\nexcept SystemExit: pass')", 0, "0"),
    ],
)
@pytest.mark.parametrize("how", ["script", "command"])
def test_the_exit_code_is_known_at_the_end(tmp_path, how, end, code, known):
    program = PROGRAM.format(end)
    (tmp_path / "script.py").write_text(program)
    command = [tmp_path / "script.py"] if how == "script" else ["-c", program]
    started = {"env": environment(), "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *command], **started)
    assert (done.returncode, done.stdout.strip()) == (code, known), done.stderr
