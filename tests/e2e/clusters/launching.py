"""`python -m jddp.launch` on machines that are namespaces."""

import functools
import subprocess
import sys

from faults.jobs import train_command, variables_of
from runs import number_of, read_proc, wait_until
from test_launch import Launched

NODE = ["--num-processes", "2", "--devices-per-process", "1"]
LONGER = ["train.num_steps=240", "checkpoint.every_steps=20"]  # than it takes to be disturbed


class OnHost(Launched):
    """A module on a host, in a folder of `make_folder`."""

    seconds = 120  # for what takes ten

    def __init__(self, hosts, host, folder, *arguments, module="jddp launch", **variables):
        command = [sys.executable, "-m", *module.split(), *arguments]
        self.folder, pipes = folder, {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        env = variables_of(folder, **variables)
        self.process = hosts.start(host, *command, cwd=folder, env=env, text=True, **pipes)


def two_launchers(hosts, folder, run, *arguments, options=(), address="h1:61500", **variables):
    """Starts two processes on h1, when the first that is returned is called, and two on h2."""
    job = [*NODE, "--num-nodes", "2", "--coordinator", address, *options]
    training = train_command(run, "mesh.num_devices=auto", *arguments)[1:]

    def node(rank):
        (memory := hosts.scratch / f"memory-{rank}").mkdir(exist_ok=True)
        own = {"JDDP_MEMORY_DIR": str(memory)}
        mine = [*job, "--node-rank", str(rank), "--logs", f"logs-{run}-{rank}"]
        return OnHost(hosts, f"h{rank + 1}", folder, *mine, *training, **variables, **own)

    return functools.partial(node, 0), functools.partial(node, 1)


def workers_of(hosts, name, variable="JAX_PROCESS_ID"):
    """The processes of a job that run on a host, by their numbers in the job."""
    pids = sorted(hosts.pids(name), reverse=True)  # Their own children are younger.
    return {int(x): pid for pid in pids if (x := number_of(pid, variable)) is not None}


def assert_empty(hosts, name):
    wait_until(lambda: not any(read_proc(pid, "cmdline") for pid in hosts.pids(name)), seconds=30)
