"""Jobs that real Open MPI and real MPICH start, on one host and on several, and their faults."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import runs
from faults.jobs import FEW, Job, assert_alike, result, saved_steps, train_command, variables_of
from runs import records, wait_until

from clusters.hosts import Hosts, refuse_without
from clusters.launching import workers_of

pytestmark = pytest.mark.processes
TEMPLATE = runs.ROOT / "scripts" / "openmpi.sh"
OFTEN = ["checkpoint.every_steps=20", "train.num_steps=400"]
ONE_HOST, TWO_HOSTS = ["--oversubscribe", "-n", "2"], ["-H", "h1:1,h2:1"]
HANDED_ON = ("PATH", "PYTHONPATH", "XDG_CACHE_HOME", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
X = [word for name in HANDED_ON for word in ("-x", name)]
# How mpirun reaches other hosts. They see none of the variables that are set here, as with sshd.
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host="$1"
shift
case "$host" in
%s
esac
"""


class Cluster(Hosts):
    """Hosts that start each other's processes, with a user's folder that all of them see."""

    def __init__(self, scratch: Path, folder: Path, *names: str):
        refuse_without("mpirun.openmpi", "mpiexec.mpich")
        super().__init__(scratch, *names)
        self.folder = folder
        bare = ["env", "-i", f"PATH={os.environ['PATH']}", f"TMPDIR={scratch}", "sh", "-c"]
        cases = [f'{name}) exec {shlex.join(self.command(name, *bare))} "$*" ;;' for name in names]
        self._add("ssh", SSH % "\n".join(cases))
        (folder / "hosts").write_text("# mine\n\nh1 slots=1\nh2 slots=1\n")
        self._add("mpirun", '#!/bin/sh\nexec mpirun.openmpi "$@"\n')

    def job(self, host, *command, **variables):
        """A command that starts a job, in the user's folder."""
        path = [self.scratch / "bin", Path(sys.executable).parent, os.environ["PATH"]]
        as_root = dict.fromkeys(["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"], "1")
        environ = {"PATH": ":".join(map(str, path)), "TMPDIR": str(self.scratch), **as_root}
        environ = variables_of(self.folder, JAX_NUM_CPU_DEVICES="2", **environ, **variables)
        return Started(self, host, ["env", f"--chdir={self.folder}", *command], environ)

    def _add(self, name, text):
        path = self.scratch / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)


class Started(Job):
    """A command on a host; ended with the block, with all that runs on any host."""

    def __init__(self, cluster, host, command, environ):
        super().__init__(cluster.folder, num_processes=0)
        self.cluster = cluster
        self._start(cluster.command(host, *command), env=environ, stdin=subprocess.DEVNULL)
        (self.process,) = self.processes

    def __exit__(self, *_):
        for name in self.cluster.addresses:
            self.cluster.end(name)
        super().__exit__()

    @property
    def text(self):
        """What the command has printed, and its errors."""
        return "".join(self.outputs[0])

    def wait_until_saved(self, run, step):
        self.wait_for(lambda: max(saved_steps(self.cluster.folder / run), default=0) >= step)

    def end(self):
        """Waits until nothing runs on any host; returns the exit code of the command."""
        pids, hosts = self.cluster.pids, self.cluster.addresses
        wait_until(lambda: not any(map(pids, hosts)), said=lambda: self.text, pause=0.1)
        return self.process.wait()


@pytest.fixture
def cluster(tmp_path, jobs):
    with Cluster(tmp_path, jobs, "h1", "h2", "h3") as cluster:
        yield cluster


def assert_trained(job, run, one):
    """Processes of two devices each have trained as one of four."""
    assert job.end() == 0, job.text
    assert_alike(result(job.cluster.folder, run)[0], one)


@pytest.mark.slow
def test_processes_of_open_mpi_train_as_one_and_are_saved_at_a_signal_to_mpirun(cluster, golden):
    constant = [*FEW, "optimizer.schedule.name=constant_schedule"]  # however many steps there are
    endless = [*constant, "checkpoint.every_steps=1000000", "train.num_steps=1000000"]
    one = records(golden(*constant, "mesh.num_devices=4").run_dir)
    patience = ["--mca", "odls_base_sigkill_timeout", "8"]  # before SIGTERM, and after it
    command = ["mpirun", *ONE_HOST, *patience, *train_command("signal", *endless)]
    run_dir = cluster.folder / "signal"
    with cluster.job("h1", *command) as job:
        job.wait_for(lambda: len(records(run_dir)) > 6)
        job.process.send_signal(signal.SIGTERM)
        assert job.end() != 0
    trained = [record for record in one if record["split"] == "train"]
    assert_alike(records(run_dir)[: len(trained)], trained)
    assert "job      2 processes, set by Open MPI; process 0; coordinator 127.0.0.1:" in job.text
    assert "\x1b" not in job.text
    assert f"SIGTERM: saved step {saved_steps(run_dir)[-1]}" in job.text


@pytest.mark.slow
def test_a_killed_process_ends_a_job_of_open_mpi(cluster):
    arguments = ["checkpoint.every_steps=20", "train.num_steps=1000000"]
    with cluster.job("h1", "mpirun", *ONE_HOST, *train_command("killed", *arguments)) as job:
        job.wait_until_saved("killed", 20)
        os.kill(workers_of(cluster, "h1", "OMPI_COMM_WORLD_RANK")[1], signal.SIGKILL)
        assert job.end() != 0
    assert "signal 9 (Killed)" in job.text


@pytest.mark.slow
@pytest.mark.parametrize("host", ["h1", "h3"])
def test_mpirun_on_the_first_host_or_with_the_option_that_it_needs_on_a_third(cluster, one, host):
    run, command = f"from-{host}", ["mpirun", *TWO_HOSTS, *X]
    if host == "h3":
        with cluster.job("h3", *command, *train_command(run, *FEW)) as job:
            assert job.end() == 2
        needs = re.search(r"jddp: mpirun and process 0 .* give mpirun (-x) (\S+=h1:\d+)", job.text)
        assert needs, job.text
        assert not (cluster.folder / run).exists()
        command += needs.groups()
    with cluster.job(host, *command, *train_command(run, *FEW)) as job:
        assert_trained(job, run, one)
    assert "coordinator h1:" in job.text or f"coordinator {cluster.addresses['h1']}:" in job.text


@pytest.mark.slow
def test_the_template_trains_on_the_machines_of_its_file(cluster, one):
    arguments = ["--config", "job.yaml", "run.dir=template", *FEW]
    settings = {"PER_HOST": "1", "NETWORK": "10.8.0.0/24"}
    with cluster.job("h3", TEMPLATE, *arguments, **settings) as job:
        assert_trained(job, "template", one)


@pytest.mark.parametrize(
    "here, environ, address",
    [("h1", None, None), ("h2", None, None), ("h3", None, r"h1:6\d{4}"), ("h3", "h2:5", "h2:5")],
)
def test_the_template_says_where_the_first_process_is_if_not_here(cluster, here, environ, address):
    (cluster.scratch / "bin" / "mpirun").write_text('#!/bin/sh\necho "$@"; env\n')
    set_here = {"NCCL_DEBUG": "WARN"} | ({"JAX_COORDINATOR_ADDRESS": environ} if environ else {})
    with cluster.job(here, TEMPLATE, "key=a value", **set_here) as job:
        assert job.end() == 0, job.text
    command, *environ = job.text.splitlines()
    assert command.endswith(" python -m jddp.train key=a value")
    assert "-x NCCL_DEBUG" in command
    assert ("-x JAX_COORDINATOR_ADDRESS" in command) == (address is not None)
    found = [x.partition("=")[2] for x in environ if x.startswith("JAX_COORDINATOR_ADDRESS=")]
    assert found == [x for x in found if re.fullmatch(address or "none", x)]
    assert len(found) == (address is not None)


# MPICH.


@pytest.mark.slow
def test_processes_of_mpich_are_shown_what_they_need_and_train_as_one(cluster, one):
    command, training = ["mpiexec.mpich", "-n", "2"], train_command("mpich", *FEW)
    with cluster.job("h1", *command, *training) as job:
        assert job.end() == 2, job.text
    needs = "jddp: MPICH does not give the address of process 0: set JAX_COORDINATOR_ADDRESS"
    assert needs in job.text
    given = ["-genv", "JAX_COORDINATOR_ADDRESS", "localhost:1234"]
    with cluster.job("h1", *command, *given, *training) as job:
        assert_trained(job, "mpich", one)
    assert "job      2 processes, set by MPICH; process 0; coordinator localhost:1234" in job.text
