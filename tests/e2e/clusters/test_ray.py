"""Jobs on a real Ray cluster, whose nodes are hosts of their own, and their faults."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from faults.jobs import Job, make_folder
from runs import ROOT, environment, wait_until
from test_launch import assert_alike, launch, result

from clusters.hosts import Hosts
from clusters.launching import OnHost, workers_of
from jddp.commands.launch import _parser, plan_launch
from jddp.ground.errors import ExitCode

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.xdist_group("ray")]
SECONDS = 240  # for what takes thirty: Ray starts a dozen processes for each job
ADDRESS = "h1:6379"
TWO = ["--ray", ADDRESS, "--num-processes", "2", "--devices-per-process", "1"]
FEW = ["train.num_steps=6", "train.log_every_steps=1"]
MISSING = "there is no Ray: scripts/venv dev,ray installs it"
TEMPLATE = ROOT / "scripts" / "ray_cluster.yaml"
# As `ray up` reads a cluster, before it asks for machines.
PARSE = """
import sys

import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

for text in sys.argv[1:]:
    try:
        validate_config(prepare_config(yaml.safe_load(text)))
        print("taken")
    except Exception:
        print("refused")
"""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
# A node that does not answer three times in 4 s is lost; Ray's defaults are five times in 10 s.
SOON = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "4000"}
SOON |= {"RAY_health_check_failure_threshold": "3", "RAY_health_check_initial_delay_ms": "1000"}
LONG = ["train.num_steps=400", "checkpoint.every_steps=20"]


class RayCluster(Hosts):
    """Hosts that are nodes of Ray, with a CPU each; the first is the head."""

    def __init__(self, scratch, folder):
        super().__init__(scratch, "h1", "h2", "h3", network="10.9.0")
        self.folder, self.log = folder, scratch / "ray.log"

    def add(self, name):
        head = ["--head", "--port=6379", "--include-dashboard=false"]
        where = head if name == "h1" else [f"--address={ADDRESS}"]
        where += [f"--node-ip-address={self.addresses[name]}", "--num-cpus=1"]
        where += ["--object-store-memory=100000000", "--disable-usage-stats"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *where]
        about = {"env": environment(**QUIET, **SOON), "cwd": self.folder}
        with self.log.open("a") as log:
            started = self.start(name, *command, stdout=log, stderr=log, **about)
        assert started.wait(timeout=SECONDS) == 0, self.log.read_text()

    def launch(self, *arguments, run="run", launch=TWO, options=()):
        """A job of `jddp.train`, whose driver is on the first host."""
        train = ["-m", "jddp.train", "--config", "job.yaml", "mesh.num_devices=auto"]
        options = [*launch, "--logs", f"logs-{run}", *options]
        variables = {**QUIET, "RAY_DEDUP_LOGS": "0"}
        command = [*options, *train, f"run.dir={run}", *arguments]
        return OnHost(self, "h1", self.folder, *command, **variables)

    def process(self, number):
        def found():
            pids = {name: workers_of(self, name).get(number) for name in self.addresses}
            return [(pid, name) for name, pid in pids.items() if pid]

        wait_until(found, seconds=SECONDS)
        return found()[0]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, request):
    """Two nodes, and a folder in which one process has trained, and two without Ray."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip(MISSING)
    folder = make_folder(tmp_path_factory.mktemp("jobs"), request.config.cache.mkdir("jobs"))
    with (
        Job(folder, *FEW, "run.dir=one", variables={"JAX_NUM_CPU_DEVICES": "2"}) as one,
        Job(folder, *LONG, "run.dir=two", num_processes=2) as two,
    ):
        assert one.codes() + two.codes() == [0, 0, 0], (one.outputs, two.outputs)
    with RayCluster(tmp_path_factory.mktemp("cluster"), folder) as cluster:
        cluster.add("h1")
        cluster.add("h2")
        yield cluster


def end(job):
    """Waits for the end of a job; returns what it said, which Ray moves from stream to stream."""
    job.code = job.end(SECONDS)
    return job.out + job.err


def test_workers_train_as_one_process(cluster):
    with cluster.launch(*FEW, run="few") as job:
        said = end(job)
    assert job.code == 0, said
    assert "2 processes, set by Ray; process 0; coordinator 10.9.0." in said
    records, *_ = result(cluster.folder, "few")
    assert_alike(records, result(cluster.folder, "one")[0])
    (reported,) = (cluster.folder / "logs-few").glob("*/checkpoint_*/result.json")
    facts = json.loads(reported.read_text())
    assert (facts["step"], facts["loss"]) == (6, records[-1]["loss"])


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_process_resumes_to_the_same_bits(cluster, number):
    run = f"killed-{number}"
    with cluster.launch(*LONG, run=run, options=["--max-restarts", "1"]) as job:
        job.wait_for(f"{run}/checkpoints/40")
        os.kill(cluster.process(number)[0], signal.SIGKILL)
        said = end(job)
    assert job.code == 0, said
    assert re.search(f"process {number} on h. failed first, with signal SIGKILL", said), said
    assert "restart 1 of 1 now" in said  # By jddp: Ray restarts nothing.
    assert "resumed from step" in said
    assert result(cluster.folder, run) == result(cluster.folder, "two")


def test_what_a_process_raises_is_said_at_the_driver_with_its_exit_code(cluster):
    (cluster.folder / "fail-1").touch()
    try:
        with cluster.launch(*FEW, run="raises") as job:
            said = end(job)
    finally:
        (cluster.folder / "fail-1").unlink()
    assert job.code == 1, said
    last = said[said.rindex("jddp: process 1 on h") :]
    assert "failed first, with exit code 1: RuntimeError: a bug in reading" in last
    assert "Traceback" in last
    assert 'raise RuntimeError("a bug in reading")' in last


def test_a_job_that_is_stopped_before_its_processes_run_is_to_be_resumed(cluster):
    with cluster.launch(*FEW, run="early") as job:
        job.wait_until(lambda: (cluster.folder / "logs-early").exists())
        job.process.send_signal(signal.SIGTERM)
        said = end(job)
    assert job.code == ExitCode.PREEMPTED, said
    assert not list((cluster.folder / "logs-early").glob("process_*.log"))


def test_an_address_without_a_cluster_and_a_cluster_that_is_too_small_are_one_line_each(cluster):
    with cluster.launch(launch=["--ray", "h1:9"]) as job:
        assert job.end(SECONDS) == ExitCode.UNAVAILABLE
    (line,) = job.err.splitlines()
    assert line.startswith("jddp: --ray h1:9: no cluster of `ray start --head` answers there (")
    asked = ["--ray", ADDRESS, "--num-processes", "5", "--start-seconds", "2"]
    with cluster.launch(launch=asked) as job:
        assert job.end(SECONDS) == ExitCode.UNAVAILABLE, job.err
    *_, line = job.err.splitlines()
    asked = "5 processes need 1 CPU each, and the nodes of Ray have 1 CPU, 1 CPU"
    assert line == f"jddp: {asked}. Ask for less, or start more nodes."


def test_a_node_that_goes_away_is_replaced_by_another(cluster):
    with cluster.launch(*LONG, run="lost", options=["--max-restarts", "1"]) as job:
        job.wait_for("lost/checkpoints/40")
        assert {cluster.process(i)[1] for i in (0, 1)} == {"h1", "h2"}
        cluster.set_link("h2", "down")
        cluster.end("h2")
        cluster.add("h3")
        said = end(job)
    assert job.code == 0, said
    assert "resumed from step" in said
    assert result(cluster.folder, "lost") == result(cluster.folder, "two")


@pytest.mark.long
def test_an_elastic_job_continues_without_a_node_and_with_one_that_comes(cluster):
    elastic, log = ["--min-processes", "1", "--max-restarts", "1"], "logs-elastic/process_0.log"
    with cluster.launch(*LONG, run="elastic", options=elastic) as job:
        job.wait_for("elastic/checkpoints/40")
        (lost,) = {cluster.process(i)[1] for i in (0, 1)} - {"h1"}
        cluster.set_link(lost, "down")
        cluster.end(lost)
        job.wait_for_words(log, "num_processes 2 -> 1")
        (cluster.folder / "hang-0").touch()  # until Ray looks for nodes, once a minute
        cluster.set_link(lost, "up")
        cluster.add(lost)
        assert cluster.process(1)
        (cluster.folder / "hang-0").unlink()
        said = end(job)
    assert job.code == 0, said
    began = re.findall(r"\| (\d) process", (cluster.folder / log).read_text())
    assert began == ["2", "1", "2"], said
    assert result(cluster.folder, "elastic")[1] == 400


def test_without_ray_one_line_says_how_to_install_it(tmp_path):
    (tmp_path / "ray.py").write_text("raise ImportError\n")
    folder = make_folder(tmp_path / "user", tmp_path)
    path = f"{tmp_path}{os.pathsep}{environment()['PYTHONPATH']}"
    done = launch(folder, "--ray", "--num-processes", 2, "-m", "jddp.train", PYTHONPATH=path)
    assert done.code == ExitCode.USAGE
    assert done.err == "jddp: a job on Ray needs Ray 2.60 or newer: pip install 'jddp[ray]'.\n"


def test_the_template_is_what_ray_takes():
    if importlib.util.find_spec("ray") is None:
        pytest.skip(MISSING)
    text = TEMPLATE.read_text()
    wrong = text.replace("head_node_type: head", "head: head")
    assert wrong != text
    how = {"env": environment(**QUIET), "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", PARSE, text, wrong], check=True, **how)
    assert done.stdout.split() == ["taken", "refused"], done.stdout


def test_the_command_of_the_template_is_one_of_the_launcher():
    command = re.search(r"python -m jddp.launch (.+?)'", TEMPLATE.read_text(), re.DOTALL)[1]
    words = re.sub(r"\\\n#", "", command).split()
    plan = plan_launch(_parser().parse_args(words))
    assert (plan.num_processes, plan.command[:2]) == (16, ("-m", "jddp.train"))
