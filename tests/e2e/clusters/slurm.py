"""Slurm on machines that are namespaces: a controller where jobs are submitted, and four nodes."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

from runs import ROOT, environment, wait_until

from clusters.hosts import Hosts, refuse_without

SECONDS = 240  # for what takes ten or twenty
LOGIN, NODES = "login", ("n1", "n2", "n3", "n4")
DAEMONS = ("slurmctld", "slurmd")
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
# cred_expire is also how long a job is held before it runs again: two minutes, otherwise.
_CONFIG = """
ClusterName=tests
SlurmctldHost={login}
SlurmUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_interval=1
ReturnToService=2
GresTypes=gpu
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
NodeName={nodes} CPUs=4 RealMemory=100 Gres=gpu:4
PartitionName=all Nodes=ALL Default=YES
"""
_CGROUPS = "CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n"
_GPUS = "Name=gpu File={folder}/gpu[0-3]\n"


class Slurm:
    """A cluster of Slurm; ended with the block, with all that runs on it."""

    def __init__(self, folder: Path):
        refuse_without(*DAEMONS, "srun", "sbatch", "scancel", "scontrol")
        texts = {"slurm.conf": _CONFIG, "cgroup.conf": _CGROUPS, "gres.conf": _GPUS}
        for name, text in texts.items():
            text = text.format(folder=folder, login=LOGIN, nodes=",".join(NODES))
            (folder / name).write_text(text)
        for number in range(4):
            os.mknod(folder / f"gpu{number}", 0o020600, os.makedev(1, 3))  # /dev/null by name
        self._folder = folder
        kept = {k: v for k, v in environment().items() if not k.startswith("SLURM")}
        python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        kept |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": python}
        self.environ = kept
        self._hosts = Hosts(folder, LOGIN, *NODES)

    def __enter__(self):
        self._daemons = [self._start(LOGIN, "slurmctld", "-D", "-c", "-i")]
        self._daemons += [self._start(node, "slurmd", "-D", "-c", "-N", node) for node in NODES]
        try:
            self.wait_for(lambda: self._answer("sinfo", "-h", "-o", "%T %D") == "idle 4")
        except BaseException:
            self.__exit__()
            raise
        self._at_rest = {pid for node in NODES for pid in self._hosts.pids(node)}
        return self

    def __exit__(self, *_):
        self._hosts.__exit__()
        for daemon in self._daemons:
            daemon.wait()

    def run(self, *command, cwd=ROOT, **variables):
        how = {"env": self.environ | variables, "timeout": SECONDS}
        return self._hosts.run(LOGIN, *_in(cwd, command), **how)

    def start(self, *command, cwd=ROOT, **variables):
        """Starts a command on the host of the controller; what it says is read together."""
        said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        how = {"env": self.environ | variables, **said}
        return self._hosts.start(LOGIN, *_in(cwd, command), **how)

    def submit(self, *arguments, cwd=ROOT, **variables):
        done = self.run("sbatch", "--parsable", *arguments, cwd=cwd, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, job):
        """What Slurm says of a job, by its words for it."""
        return dict(re.findall(r"(\w+)=(\S*)", self._answer("scontrol", "show", "-o", "job", job)))

    def end_of(self, job):
        """Waits for the end of a job, and of all its processes; returns what Slurm says of it."""
        self.wait_for(lambda: self.job(job)["JobState"] in _ENDED)
        self.wait_for(lambda: not self.running())
        return self.job(job)

    def running(self):
        """Numbers of the processes of jobs, on all nodes."""
        return {pid for node in NODES for pid in self._hosts.pids(node)} - self._at_rest

    def task(self, number):
        """The process of jddp that is this task; the only job is of one step."""
        found = []
        for pid in self.running():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
                if "-m" in command[1:2] and f"SLURM_PROCID={number}" in environ:
                    found.append(pid)
        (pid,) = found
        return pid

    def end_node(self, node):
        self._hosts.end(node)

    def end_jobs(self):
        self._answer("scancel", "--user=root")
        self._answer("scancel", "--user=root", "--signal=KILL")
        self.wait_for(lambda: not self._answer("squeue", "-h") and not self.running())

    def wait_for(self, condition, seconds=SECONDS):
        """Waits until a condition holds; each look is a few processes."""
        wait_until(condition, said=self._logs, seconds=seconds, pause=0.2)

    def _start(self, host, *command):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return self._hosts.start(host, *command, env=self.environ, **quiet)

    def _answer(self, *command):
        return self.run(*command).stdout.strip()

    def _logs(self):
        ends = [f"{path.name}\n{path.read_text()[-2000:]}" for path in self._folder.glob("*.log")]
        return "the condition was not met in time\n" + "\n".join(ends)


def _in(folder, command):
    # A namespace is entered at its root.
    return ["env", "--chdir", str(folder), *map(str, command)]
