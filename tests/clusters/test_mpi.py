"""Jobs that real Open MPI and real MPICH start, on one host and on several, and their faults."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs
from faults.jobs import Job, make_folder
from test_launch import FEW, assert_alike, result

from clusters.hosts import Hosts, refuse_without

pytestmark = pytest.mark.processes
TEMPLATE = runs.REPOSITORY / "scripts" / "openmpi.sh"
SECONDS = 120  # for what takes ten
OFTEN = ["checkpoint.every_steps=20", "train.num_steps=400"]
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
SHOW = """
from jddp.trainer.reports.progress import Progress

progress = Progress(100, is_writer=True)
for step in range(1, 101):
    progress.log({"step": step, "split": "train", "loss": 1.0})
progress.close()
"""
ON_A_TERMINAL = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])"]


class Cluster(Hosts):
    """Hosts that start each other's processes, with a user's folder that all of them see."""

    def __init__(self, scratch: Path, folder: Path, *names: str):
        refuse_without("mpirun.openmpi", "mpiexec.mpich")
        super().__init__(scratch, *names)
        self.folder, self.scratch = folder, scratch
        bare = ["env", "-i", f"PATH={os.environ['PATH']}", f"TMPDIR={scratch}", "sh", "-c"]
        cases = [f'{name}) exec {shlex.join(self.command(name, *bare))} "$*" ;;' for name in names]
        self._add("ssh", SSH % "\n".join(cases))
        self._add("mpirun", '#!/bin/sh\nexec mpirun.openmpi "$@"\n')

    def job(self, host, *command, **variables):
        """A command that starts a job, in the user's folder."""
        path = [self.scratch / "bin", Path(sys.executable).parent, os.environ["PATH"]]
        told = environment(self.folder) | {
            "PATH": ":".join(map(str, path)),
            "TMPDIR": str(self.scratch),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        return Started(self, host, ["env", f"--chdir={self.folder}", *command], told | variables)

    def _add(self, name, text):
        path = self.scratch / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)


class Started:
    """A command on a host; ended with the block, with all that runs on any host."""

    def __init__(self, cluster, host, command, environ):
        self.cluster, self._said = cluster, cluster.scratch / f"said-{time.monotonic_ns()}"
        with self._said.open("w") as said:
            how = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": subprocess.STDOUT}
            self.process = cluster.start(host, *command, env=environ, **how)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in self.cluster.addresses:
            self.cluster.end(name)
        self.process.wait()

    @property
    def said(self):
        return self._said.read_text()

    def wait_for(self, name):
        """Waits until there is a file of this name, as long as the command runs."""
        until = time.monotonic() + SECONDS
        while not (self.cluster.folder / name).exists():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < until, self.said
            time.sleep(0.01)

    def end(self, seconds=SECONDS):
        """Waits until nothing runs on any host; returns the exit code of the command."""
        until = time.monotonic() + seconds
        while any(map(self.cluster.pids, self.cluster.addresses)):
            assert time.monotonic() < until, self.said
            time.sleep(0.1)
        return self.process.wait()

    def pid(self, host, process):
        """The process of this number that Open MPI has started on a host."""
        mine = f"OMPI_COMM_WORLD_RANK={process}"
        for pid in self.cluster.pids(host):
            with contextlib.suppress(OSError):
                if mine in Path(f"/proc/{pid}/environ").read_text().split("\0"):
                    return pid
        raise AssertionError(f"{host} has no process {process}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    """A user's folder, in which one process of two devices has trained a few steps."""
    folder = make_folder(tmp_path_factory.mktemp("jobs"), request.config.cache.mkdir("jobs"))
    told = environment(folder) | {"JAX_NUM_CPU_DEVICES": "2"}
    subprocess.run(train("one", *FEW), cwd=folder, env=told, check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture
def cluster(tmp_path, folder):
    with Cluster(tmp_path, folder, "h1", "h2", "h3") as cluster:
        yield cluster


def environment(folder):
    """Of processes with one device each."""
    cache = (folder / "cache").read_text()
    return runs.environment(XDG_CACHE_HOME=cache, JAX_NUM_CPU_DEVICES="1")


def train(run, *arguments):
    command = [sys.executable, "-m", "jddp.train", "--config", "job.yaml"]
    return [*command, f"run.dir={run}", *arguments]


def assert_trained_as_one(job, run):
    assert job.end() == 0, job.said
    assert_alike(result(job.cluster.folder, run)[0], result(job.cluster.folder, "one")[0])


# Open MPI.


@pytest.mark.slow
def test_processes_of_open_mpi_train_as_one_with_as_many_devices(cluster):
    with cluster.job("h1", "mpirun", "--oversubscribe", "-n", "2", *train("two", *FEW)) as job:
        assert_trained_as_one(job, "two")
    assert "job      2 processes, set by Open MPI; process 0; coordinator 127.0.0.1:" in job.said
    assert "\x1b" not in job.said


@pytest.mark.slow
def test_a_killed_process_ends_a_job_of_open_mpi(cluster):
    arguments = ["checkpoint.every_steps=20", "train.num_steps=1000000"]
    options = ["--oversubscribe", "-n", "2"]
    with cluster.job("h1", "mpirun", *options, *train("killed", *arguments)) as job:
        job.wait_for("killed/checkpoints/20")
        os.kill(job.pid("h1", 1), signal.SIGKILL)
        assert job.end() != 0
    assert "signal 9 (Killed)" in job.said


@pytest.mark.slow
def test_two_hosts_train_as_one_when_mpirun_runs_on_the_first(cluster):
    command = ["mpirun", *X, "-H", "h1:1,h2:1", *train("pair", *FEW)]
    with cluster.job("h1", *command) as job:
        assert_trained_as_one(job, "pair")
    assert f"coordinator {cluster.addresses['h1']}:" in job.said


@pytest.mark.slow
def test_mpirun_on_a_third_host_is_given_the_option_that_it_needs(cluster):
    options = ["-H", "h1:1,h2:1", *X]
    with cluster.job("h3", "mpirun", *options, *train("third", *FEW)) as job:
        assert job.end() == 2
    needs = re.findall(r"jddp: mpirun runs on another .* give it (-x) (\S+=h1:\d+), so", job.said)
    assert len(needs) == 1, job.said
    assert not (cluster.folder / "third").exists()
    with cluster.job("h3", "mpirun", *options, *needs[0], *train("third", *FEW)) as job:
        assert_trained_as_one(job, "third")


@pytest.mark.slow
def test_a_link_that_goes_down_ends_the_job_on_both_sides_and_the_same_command_resumes(cluster):
    with Job(cluster.folder, *OFTEN, "run.dir=golden", num_processes=2) as golden:
        assert golden.codes() == [0, 0], golden.outputs
    quickly = {"time": "2", "intvl": "1", "probes": "3"}
    keepalive = [x for k, v in quickly.items() for x in ("--mca", f"oob_tcp_keepalive_{k}", v)]
    command = ["mpirun", *X, "-H", "h1:1,h2:1", *keepalive, *train("linked", *OFTEN)]
    with cluster.job("h1", *command) as job:
        job.wait_for("linked/checkpoints/60")
        cluster.set_link("h2", "down")
        assert job.end() != 0
    assert "lost communication with a remote daemon" in job.said
    cluster.set_link("h2", "up")
    with cluster.job("h1", *command) as job:
        assert job.end() == 0, job.said
    assert "resumed from step" in job.said
    assert result(cluster.folder, "linked") == result(cluster.folder, "golden")


@pytest.mark.slow
def test_the_template_trains_on_the_machines_of_its_file(cluster):
    (cluster.folder / "hosts").write_text("# mine\n\nh1 slots=1\nh2 slots=1\n")
    arguments = ["--config", "job.yaml", "run.dir=template", *FEW]
    settings = {"PER_HOST": "1", "NETWORK": "10.8.0.0/24"}
    with cluster.job("h3", TEMPLATE, *arguments, **settings) as job:
        assert_trained_as_one(job, "template")


@pytest.mark.parametrize(
    "here, told, address",
    [("h1", None, None), ("h2", None, None), ("h3", None, r"h1:6\d{4}"), ("h3", "h2:5", "h2:5")],
)
def test_the_template_says_where_the_first_process_is_if_it_is_not_here(
    cluster, here, told, address
):
    (cluster.folder / "hosts").write_text("# mine\n\nh1 slots=1\nh2 slots=1\n")
    (cluster.scratch / "bin" / "mpirun").write_text('#!/bin/sh\necho "$@"; env\n')
    set_here = {"NCCL_DEBUG": "WARN"} | ({} if told is None else {"JAX_COORDINATOR_ADDRESS": told})
    with cluster.job(here, TEMPLATE, "key=a value", **set_here) as job:
        assert job.end() == 0, job.said
    command, *environ = job.said.splitlines()
    assert command.endswith(" python -m jddp.train key=a value")
    assert "-x NCCL_DEBUG" in command
    assert ("-x JAX_COORDINATOR_ADDRESS" in command) == (address is not None)
    found = [line for line in environ if line.startswith("JAX_COORDINATOR_ADDRESS=")]
    assert len(found) == (address is not None)
    assert all(re.fullmatch(f"JAX_COORDINATOR_ADDRESS={address}", line) for line in found)


@pytest.mark.slow
def test_a_signal_to_mpirun_saves_if_it_gives_the_time(cluster):
    endless = ["checkpoint.every_steps=1000000", "train.num_steps=1000000"]
    patience = ["--mca", "odls_base_sigkill_timeout", "8"]  # before SIGTERM, and after it
    command = ["mpirun", "--oversubscribe", "-n", "2", *patience, *train("signal", *endless)]
    with cluster.job("h1", *command) as job:
        job.wait_for("signal/metrics.jsonl")
        job.process.send_signal(signal.SIGTERM)
        assert job.end() != 0
    assert "SIGTERM: saved step" in job.said
    assert result(cluster.folder, "signal")[1] > 0


# MPICH.


@pytest.mark.slow
def test_processes_of_mpich_train_as_one_with_as_many_devices(cluster):
    told = ["-genv", "JAX_COORDINATOR_ADDRESS", "localhost:1234"]
    with cluster.job("h1", "mpiexec.mpich", "-n", "2", *told, *train("mpich", *FEW)) as job:
        assert_trained_as_one(job, "mpich")
    assert "job      2 processes, set by MPICH; process 0; coordinator localhost:1234" in job.said


def test_mpich_that_does_not_say_where_the_first_process_is_is_shown_what_it_needs(cluster):
    with cluster.job("h1", "mpiexec.mpich", "-n", "2", *train("nowhere")) as job:
        assert job.end() == 2, job.said
    assert (
        "jddp: MPICH does not give the address of process 0: set JAX_COORDINATOR_ADDRESS"
        in job.said
    )


# The terminal.


def test_a_terminal_has_one_live_line():
    done = subprocess.run(
        [*ON_A_TERMINAL, sys.executable, "-c", SHOW],
        env=runs.environment(TERM="xterm"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert "\x1b[" in done.stdout, done


def test_the_terminal_that_open_mpi_makes_for_each_process_has_none(cluster):
    program = [sys.executable, "-c", SHOW]
    starts = ["mpirun", "--oversubscribe", "-n", "1", *program]
    for command in (starts, [*ON_A_TERMINAL, *starts]):
        with cluster.job("h1", *command, TERM="xterm") as job:
            assert job.end() == 0
        assert [line.split()[1] for line in job.said.splitlines()] == ["1/100", "100/100"]
        assert "\x1b" not in job.said
