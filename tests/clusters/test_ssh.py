"""`--hosts`: a launcher starts others through a real sshd, and none outlives it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from test_launch import FEW, PROGRAM, assert_alike, result

from clusters.hosts import Hosts
from clusters.launching import LONGER, NODE, SECONDS, TRAIN, OnHost, assert_only, told, workers_of
from clusters.sshd import sshd
from jddp.errors import UsageError
from jddp.launcher.ssh import SILENCE_SECONDS, choose_coordinator, parse_hosts

pytestmark = pytest.mark.processes
SHOW = """
import json
import os
import socket
import sys

names = ("PWD", "XLA_FLAGS", "JDDP_JOB", "HOME_MADE", "JAX_PROCESS_ID", "CUDA_VISIBLE_DEVICES")
told = {name: os.environ.get(name) for name in names}
told |= {"cwd": os.getcwd(), "python": sys.executable, "host": socket.gethostname()}
told |= {"arguments": sys.argv[1:]}
print(json.dumps(told))
"""
WORDS = """it's "all" one; $HOME & more"""


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """Two hosts with sshd, one without, and one where the user sits."""
    folder = tmp_path_factory.mktemp("network")
    with (
        Hosts(folder, "h1", "h2", "h3", "home") as hosts,
        sshd(hosts, folder, "h1", "h2") as bin,
    ):
        yield hosts, bin


@pytest.fixture
def launch(network):
    """Launches from home: `launch(folder, arguments)`, whose processes end with the test."""
    hosts, bin = network
    started = []

    def start(folder, *arguments, **variables):
        path = {"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "REAL_PATH": os.environ["PATH"]}
        started.append(OnHost(hosts, "home", folder, *arguments, **path, **variables))
        return started[-1]

    yield start
    for each in started:
        each.__exit__()
    for name in ("h1", "h2"):
        assert_only(hosts, name, "sshd")


@pytest.fixture
def folder(tmp_path):
    """A folder with programs without JAX, whose name has to be quoted."""
    folder = tmp_path / WORDS
    folder.mkdir()
    for name, text in {"program.py": PROGRAM, "show.py": SHOW, "cache": "/nowhere"}.items():
        (folder / name).write_text(text)
    return folder


# What is decided before ssh is asked.


def test_the_first_host_is_where_they_connect_each_job_at_a_port_of_its_own():
    assert parse_hosts("me@a, b") == ("me@a", "b")
    name, _, port = choose_coordinator("me@node-a").rpartition(":")
    assert name == "node-a"
    assert 61440 <= int(port) < 65536
    assert choose_coordinator("fd00::1").startswith("[fd00::1]:")
    assert len({choose_coordinator("a") for _ in range(5)}) > 1


def test_without_ssh_the_way_out_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="needs ssh.*--node-rank"):
        choose_coordinator("a")


# What a launcher hears on its standard input.

OBEY = """
import signal
import sys
import time
from jddp.launcher.ssh import obey_input

signal.signal(signal.SIGINT, signal.SIG_DFL)  # which whoever is in the background ignores
obey_input(0.1, float(sys.argv[1]))
print("here", flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize(
    "words, is_open, number",
    [
        (["SIGINT\n"], True, signal.SIGINT),
        (["\n", "SIG", "TERM\n"], True, signal.SIGTERM),
        (["\n"], False, signal.SIGTERM),  # the input ends
        (["\n"], True, signal.SIGTERM),  # and goes silent
    ],
)
def test_words_are_signals_and_the_end_or_silence_is_one(words, is_open, number):
    silence = 1.0 if words == ["\n"] and is_open else 100.0
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", OBEY, str(silence)], **pipes) as process:
        assert process.stdout.readline() == b"here\n"
        for word in words:
            process.stdin.write(word.encode())
            process.stdin.flush()
        if not is_open:
            process.stdin.close()
        assert process.wait(30) == -number


# Programs without JAX.


def test_each_host_has_the_same_folder_python_and_variables(folder, launch):
    variables = {"XLA_FLAGS": WORDS, "HOME_MADE": "x", "CUDA_VISIBLE_DEVICES": "0,1"}
    hosts = ["--hosts", "root@h1,h2", "--num-processes", "2"]
    done = launch(folder, *hosts, "show.py", WORDS, "--hosts", "x", **variables)
    assert done.end() == 0, done.err
    told = [json.loads(line.partition(" ")[2]) for line in done.out.splitlines()]
    told.sort(key=lambda each: each["JAX_PROCESS_ID"])
    assert [each["host"] for each in told] == ["h1", "h1", "h2", "h2"]
    for each in told:
        assert each["cwd"] == str(folder)
        assert each["python"] == sys.executable
        assert each["arguments"] == [WORDS, "--hosts", "x"]
        assert each["XLA_FLAGS"] == WORDS
        assert each["HOME_MADE"] is None
        assert each["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert len({each["JDDP_JOB"] for each in told}) == 1


@pytest.mark.parametrize("code", [7, 255])
def test_the_first_failure_of_a_host_ends_all_and_is_the_exit_code(folder, launch, code):
    job = ["--hosts", "h1,h2", "--num-processes", "1", "program.py"]
    done = launch(folder, *job, f"exit:{code}-1", "stay-0")
    assert done.end() == min(code, 254), done.err
    assert f"process 1 failed first, with exit code {code}" in done.err
    assert "jddp: the launcher on h2 ended first" in done.err
    assert "[0] here is 0 of 2" in done.out


def test_a_host_that_says_that_another_failed_first_did_not_fail_first(folder, launch):
    job = ["--hosts", "h1,h2", "--num-processes", "2", "--grace-seconds", "1", "program.py"]
    done = launch(folder, *job, "exit:81-0", "exit:81-1", "kill-2", "ignore-3", "stay-3")
    assert done.end() == 128 + signal.SIGKILL, done.err
    assert "jddp: the launcher on h2 ended first" in done.err


def test_the_first_launcher_killed_leaves_nothing_on_any_host(folder, launch, network):
    hosts, _ = network
    job = ["--hosts", "h1,h2", "--num-processes", "2", "--grace-seconds", "0.5", "program.py"]
    job = launch(folder, *job, "stay", "ignore-1", "child-2")
    job.wait_for("ignores-1", *(f"stays-{i}" for i in range(4)))
    job.process.kill()
    for name in ("h1", "h2"):
        assert_only(hosts, name, "sshd")
    assert_only(hosts, "home")


def test_a_host_that_is_lost_is_named_and_the_others_end(folder, launch, network):
    hosts, _ = network
    job = ["--hosts", "h1,h2", "--num-processes", "1", "--grace-seconds", "0.5", "program.py"]
    job = launch(folder, *job, "stay")
    job.wait_for("stays-0", "stays-1")
    sessions = [pid for pid in hosts.pids("h2") if "sshd: root" in told(pid, "cmdline")]
    assert sessions
    for pid in sessions:
        os.kill(pid, signal.SIGKILL)
    assert job.end() == 69
    assert "jddp: ssh cannot reach h2, or has lost it: " in job.err


@pytest.mark.slow
@pytest.mark.xdist_group("hosts")
def test_a_job_continues_without_a_host_that_is_lost_until_ssh_reaches_it_again(
    folder, launch, network
):
    hosts, _ = network
    job = ["--hosts", "h1,h2", "--min-processes", "1", "--max-restarts", "1"]
    job = launch(folder, *job, "--grace-seconds", "0.5", "program.py", "stay")
    job.wait_for("stays-0", "stays-1")
    for pid in hosts.pids("h2"):
        if "sshd: root" in told(pid, "cmdline"):
            os.kill(pid, signal.SIGKILL)

    def attempts(process):
        return len((folder / f"attempts-{process}").read_text().splitlines())

    until = time.monotonic() + SECONDS
    while (attempts(0), attempts(1)) != (3, 2):  # both, the first alone, both
        assert job.process.poll() is None, job.process.communicate()
        assert time.monotonic() < until, (attempts(0), attempts(1))
        time.sleep(0.05)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM, job.err
    assert "jddp: node 1 was lost." in job.err
    assert "jddp: trying h2 again" in job.err
    assert "jddp: another machine has connected: stopping, to resume with it" in job.err


@pytest.mark.long
def test_a_host_whose_link_is_cut_is_named_and_all_end(folder, launch, network):
    hosts, _ = network
    job = ["--hosts", "h1,h2", "--num-processes", "1", "--grace-seconds", "0.5", "program.py"]
    job = launch(folder, *job, "stay")
    job.wait_for("stays-0", "stays-1")
    hosts.set_link("h2", "down")
    try:
        assert job.end() == 69
        assert "jddp: ssh cannot reach h2, or has lost it: Timeout, server h2 not" in job.err
        assert not workers_of(hosts, "h1")
        until = time.monotonic() + SILENCE_SECONDS
        while workers_of(hosts, "h2"):
            assert time.monotonic() < until
            time.sleep(0.1)
    finally:
        hosts.set_link("h2", "up")


def test_a_host_that_ssh_does_not_reach_is_named_with_its_words(folder, launch):
    done = launch(folder, "--hosts", "h1,h3", "program.py", "stay-0")
    assert done.end() == 69
    last = done.err.splitlines()[-1]
    assert last.startswith(
        "jddp: ssh cannot reach h3, or has lost it: ssh: connect to host h3 port "
    )
    assert "Connection refused (ssh -o BatchMode=yes h3 true)" in last


def test_a_host_that_ssh_does_not_know_is_refused_without_a_question(folder, launch, network):
    hosts, _ = network  # its address is not in the list of keys
    yes = folder / "yes"
    yes.write_text("#!/bin/sh\ntouch asked\necho yes\n")
    yes.chmod(0o755)
    asks = {"SSH_ASKPASS": str(yes), "SSH_ASKPASS_REQUIRE": "force"}
    names = f"h1,{hosts.addresses['h2']}"
    done = launch(folder, "--hosts", names, "program.py", "stay-0", **asks)
    assert done.end() == 69
    assert not (folder / "asked").exists()
    assert "Host key verification failed." in done.err.splitlines()[-1], done.err


# Jobs of jddp, of two processes a host.

ON_HOSTS = ["--hosts", "h1,h2", *NODE]


@pytest.mark.slow
@pytest.mark.xdist_group("hosts")
def test_hosts_train_as_one(jobs, one, launch):
    done = launch(jobs, *ON_HOSTS, *TRAIN, "run.dir=ssh", *FEW)
    assert done.end() == 0, done.err
    assert "[0] job      4 processes, set by jddp.launch; process 0; coordinator h1:" in done.out
    assert_alike(result(jobs, "ssh")[0], one)


@pytest.mark.slow
@pytest.mark.xdist_group("hosts")
def test_a_killed_worker_is_started_again_bitwise_identically(jobs, golden, launch, network):
    options = ["--max-restarts", "1", "--logs", "logs-ssh"]
    job = launch(jobs, *ON_HOSTS, *options, *TRAIN, "run.dir=killed", *LONGER)
    job.wait_for("killed/checkpoints/60")
    os.kill(workers_of(network[0], "h2")[3], signal.SIGKILL)
    assert job.end() == 0, job.err
    assert "jddp: process 3 failed first, with signal SIGKILL" in job.err
    assert job.err.count("jddp: restart 1 of 1") == 2
    assert result(jobs, "killed") == golden


@pytest.mark.slow
@pytest.mark.xdist_group("hosts")
def test_a_signal_saves_on_all_hosts_and_the_same_command_resumes(jobs, golden, launch):
    job = launch(jobs, *ON_HOSTS, *TRAIN, "run.dir=stopped", *LONGER)
    job.wait_for("stopped/checkpoints/60")
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 75, job.err
    assert "failed" not in job.err
    done = launch(jobs, *ON_HOSTS, *TRAIN, "run.dir=stopped", *LONGER)
    assert done.end() == 0, done.err
    assert "resumed from step" in done.out
    assert result(jobs, "stopped")[1:] == golden[1:]
