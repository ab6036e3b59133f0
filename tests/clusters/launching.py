"""`python -m jddp.launch` on machines that are namespaces."""

import functools
import subprocess
import sys
import time
from pathlib import Path

from runs import environment
from test_launch import Launched

SECONDS = 120  # for what takes ten
NODE = ["--num-processes", "2", "--devices-per-process", "1"]
TRAIN = ["-m", "jddp.train", "--config", "job.yaml", "mesh.num_devices=auto"]
LONGER = ["train.num_steps=160", "checkpoint.every_steps=20"]  # than it takes to be disturbed


class OnHost(Launched):
    """A module on a host, in a folder of `make_folder`; ended with the block.

    Args:
      before: What a shell does there first.
    """

    def __init__(
        self, hosts, host, folder, *arguments, module="jddp.launch", before="", **variables
    ):
        self.folder = folder
        kept = environment(XDG_CACHE_HOME=(folder / "cache").read_text())
        self.process = hosts.start(
            host,
            "sh",
            "-c",
            f'{before}\nexec "$@"',
            "sh",
            sys.executable,
            "-m",
            module,
            *arguments,
            cwd=folder,
            env=kept | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, seconds=SECONDS):
        """Waits for its end; returns its exit code."""
        self.out, self.err = self.process.communicate(timeout=seconds)
        return self.process.returncode


def two_launchers(hosts, folder, run, *arguments, options=(), address="h1:61500", **variables):
    """Starts two processes on h1, when the first that is returned is called, and two on h2."""
    job = [*NODE, "--num-nodes", "2", "--coordinator", address, *options]

    def node(rank):
        mine = [*job, "--node-rank", str(rank), "--logs", f"logs-{run}-{rank}"]
        training = [*TRAIN, f"run.dir={run}", *arguments]
        return OnHost(hosts, f"h{rank + 1}", folder, *mine, *training, **variables)

    return functools.partial(node, 0), functools.partial(node, 1)


def told(pid, what):
    """What Linux tells of a process; empty if it has gone."""
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().replace(b"\0", b"\n").decode()
    except OSError:
        return ""


def workers_of(hosts, name):
    """The processes of a job that run on a host, by their numbers in the job."""
    found = {}
    for pid in hosts.pids(name):
        if "silence.py" in told(pid, "cmdline"):  # what watches a worker, in its environment
            continue
        for variable in told(pid, "environ").splitlines():
            if variable.startswith("JAX_PROCESS_ID="):
                found[int(variable.partition("=")[2])] = pid
    return found


def assert_only(hosts, name, *programs, seconds=30.0):
    """Nothing is left on a host, but for programs of these names."""
    until = time.monotonic() + seconds
    while True:
        running = filter(None, (told(pid, "cmdline") for pid in hosts.pids(name)))
        left = [command for command in running if not any(x in command for x in programs)]
        if not left:
            return
        assert time.monotonic() < until, left
        time.sleep(0.05)
