"""Machines that are namespaces end with the tests that made them, also where those are killed."""

import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT, environment, wait_until

from clusters.hosts import refuse_without

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("hosts")]
# As slurmd starts slurmstepd: in a session of its own, with nothing open that is the parent's.
USE = """
import subprocess
import sys
from pathlib import Path

from clusters.hosts import Hosts

with Hosts(Path(sys.argv[1]), "h1") as hosts:
    hosts.run("h1", "sh", "-c", "setsid sleep 1000 </dev/null >/dev/null 2>&1 &")
    print(*hosts.pids("h1"), flush=True)
    if sys.argv[2] == "killed":
        sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_what_runs_on_a_host_ends_with_the_tests(tmp_path, how):
    refuse_without("ip", "nsenter", "unshare")
    tests = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'worlds'}")
    command, pipes = [sys.executable, "-c", USE, str(tmp_path), how], {"stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=tests, stdin=subprocess.PIPE, text=True, **pipes) as user:
        (left,) = map(int, user.stdout.readline().split())
        if how == "killed":
            assert Path(f"/proc/{left}").exists()
            user.kill()
    wait_until(lambda: not Path(f"/proc/{left}").exists(), seconds=10)
