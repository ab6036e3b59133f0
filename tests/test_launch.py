"""The launcher starts processes, says who failed first, restarts them, and leaves none behind."""

import contextlib
import importlib.util
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults.jobs import make_folder
from runs import REPOSITORY, environment, free_port, records

import jddp
from jddp.distributed.resolve import resolve_identity
from jddp.distributed.signals import SAME_SECONDS
from jddp.errors import ConfigError, CoordinatorError
from jddp.launch import main
from jddp.launcher.nodes import LOCAL, Nodes
from jddp.launcher.outcome import DETERMINISTIC, lost_processes
from jddp.launcher.workers import Launch, Place, split_gpus, worker_environments

SECONDS = 60  # for what takes a few
# A program without JAX: what the launcher does is the same to it.
PROGRAM = """
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

me = os.environ["JAX_PROCESS_ID"]
Path(f"pid-{me}").write_text(str(os.getpid()))


def is_told(what):
    return f"{what}-{me}" in sys.argv


print("here is", me, "of", os.environ["JAX_NUM_PROCESSES"], sys.argv[1:])
if is_told("ignore"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(f"ignores-{me}").touch()
with open("attempts-" + me, "a") as attempts:
    attempts.write(" ".join(os.environ[x] for x in ("JAX_COORDINATOR_ADDRESS", "JDDP_JOB")) + "\\n")
for argument in sys.argv:
    if argument.startswith("exit:") and argument.endswith("-" + me):
        sys.exit(int(argument[5 : -1 - len(me)]))
if is_told("speak"):
    print("x" * 100_000)
    sys.stdout.write("no end of a line")
    sys.stdout.flush()
if is_told("once") and not Path("done").exists():
    Path("done").touch()
    sys.exit(1)
if is_told("raise"):
    raise RuntimeError("a bug in " + me)
if is_told("kill"):
    os.kill(os.getpid(), signal.SIGKILL)
if is_told("child"):
    os.fork()
    Path(f"child-{me}-{os.getpid()}").touch()
if "stay" in sys.argv or is_told("stay"):
    Path(f"stays-{me}").touch()
    time.sleep(100)
"""


class Launched:
    """`python -m jddp.launch` in a folder; ended with the block, by force if need be."""

    def __init__(self, folder, *arguments, **variables):
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jddp.launch", "--logs", "logs", *map(str, arguments)],
            cwd=folder,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()  # does nothing to one that has ended
        self.process.communicate()

    def end(self):
        """Waits for its end; returns its exit code."""
        self.out, self.err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode

    def wait_for(self, *names):
        """Waits until a program has made files of these names, with what is meant to be in them."""
        until = time.monotonic() + SECONDS
        while not all((self.folder / name).exists() for name in names):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until
            time.sleep(0.005)

    def log(self, process):
        return (self.folder / "logs" / f"process_{process}.log").read_text()


def launch(folder, *arguments, **variables):
    """Runs one to its end."""
    with Launched(folder, *arguments, **variables) as launched:
        launched.code = launched.end()
    return launched


def assert_gone(folder, seconds=5.0):
    """No process is left of those that have written down their number."""
    pids = [int(path.read_text()) for path in folder.glob("pid-*")]
    pids += [int(path.name.split("-")[2]) for path in folder.glob("child-*")]
    assert pids
    until = time.monotonic() + seconds
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < until, f"{left} are still there"
        time.sleep(0.01)


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


# What a launch decides before it starts anything.


def test_each_process_is_given_its_number():
    launch = Launch(("x.py",), 2, devices_per_process=3)
    place = Place("h:1", num_processes=4, first=2, job="word")
    first, second = worker_environments(launch, place, {"A": "1"})
    assert (first["JAX_PROCESS_ID"], second["JAX_PROCESS_ID"]) == ("2", "3")
    for told in (first, second):
        assert told["A"] == "1"
        assert told["JAX_NUM_PROCESSES"] == "4"
        assert told["JAX_COORDINATOR_ADDRESS"] == "h:1"
        assert told["JAX_NUM_CPU_DEVICES"] == "3"
        assert told["JDDP_JOB"] == "word"
        assert "CUDA_VISIBLE_DEVICES" not in told
        assert resolve_identity(told).num_processes == 4


@pytest.fixture
def address():
    """host:port on which nobody listens."""
    return f"{LOCAL}:{free_port()}"


def test_nodes_count_their_processes_together_whatever_each_starts(address):
    def gather(rank):
        nodes = Nodes(Launch(("x.py",), 1 + rank, 3, rank, address), {})
        places = [nodes.gather(), nodes.gather()]
        nodes.close(failed=False)
        return places

    with ThreadPoolExecutor() as threads:
        attempts = zip(*threads.map(gather, range(3)), strict=True)
    for places in attempts:
        assert [place.num_processes for place in places] == [6, 6, 6]
        assert [place.first for place in places] == [0, 1, 3]
        assert len({place.job for place in places}) == 1
        (coordinator,) = {place.coordinator for place in places}
        assert 0 < int(coordinator.rpartition(":")[2]) - int(address.rpartition(":")[2]) < 64


@pytest.mark.parametrize(
    "num_processes, devices, visible, num_there, shares",
    [
        (2, None, None, 0, [None, None]),
        (2, None, None, 4, ["0,1", "2,3"]),
        (2, None, None, 5, ["0,1", "2,3"]),
        (2, 1, None, 4, ["0", "1"]),
        (4, None, "4,5,6,7", 8, ["4", "5", "6", "7"]),
        (2, None, "GPU-a, GPU-b", 8, ["GPU-a", "GPU-b"]),
        (1, None, None, 4, ["0,1,2,3"]),
        (2, None, "", 8, [None, None]),
        (2, None, "-1", 8, [None, None]),
    ],
)
def test_processes_share_the_gpus_that_are_visible(
    num_processes, devices, visible, num_there, shares
):
    launch = Launch(("x.py",), num_processes, devices_per_process=devices)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert split_gpus(launch, environ, num_there) == shares


@pytest.mark.parametrize("num_processes, devices", [(3, None), (2, 2)])
def test_more_processes_than_gpus_are_refused_unless_they_are_for_cpus(num_processes, devices):
    launch = Launch(("x.py",), num_processes, devices_per_process=devices)
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    with pytest.raises(ConfigError, match=f"{num_processes} processes with .* 2 are visible: 0,1"):
        split_gpus(launch, environ, 2)
    assert split_gpus(launch, environ | {"JAX_PLATFORMS": "cpu"}, 2) == [None] * num_processes


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_port_that_is_taken_is_refused(num_nodes):
    with socket.create_server((LOCAL, 0)) as taken:
        address = f"{LOCAL}:{taken.getsockname()[1]}"
        with pytest.raises(CoordinatorError, match="is taken. Give all processes") as caught:
            Nodes(Launch(("x.py",), 1, num_nodes, 0, address), {}).gather()
    assert caught.value.exit_code == 69


@pytest.mark.parametrize(
    "arguments, told",
    [
        ("", "nothing to start: end with -m package.module"),
        ("-m", "nothing to start"),
        ("nowhere.py", "there is no script 'nowhere.py'"),
        ("--num-processes 0 -m x", "'0' is not a positive number"),
        ("--num-processes two -m x", "'two' is not a positive number"),
        ("--max-restarts -1 -m x", "--max-restarts"),
        ("--devices-per-process 0 -m x", "'0' is not a positive number"),
        ("--num-nodes 2 -m x", "--num-nodes 2 needs --coordinator host:port"),
        ("--num-nodes 2 --coordinator h:1 -m x", "and --node-rank, another on each node"),
        ("--min-processes 1 --max-restarts 1 -m x", "it needs several (--num-nodes or"),
        ("--hosts a,b --min-processes 1 -m x", "and --max-restarts"),
        ("--hosts a,,b -m x", "--hosts 'a,,b' must be names between commas"),
        ("--hosts a,me@ -m x", "must be names"),
        ("--hosts=-oProxyCommand=x,b -m x", "must be names"),
        ("--hosts a,b,me@a -m x", "names a twice"),
        ("--hosts a,b --node-rank 0 -m x", "--hosts and --node-rank cannot be combined"),
        ("--hosts a,b --num-nodes 3 -m x", "--num-nodes 3, but --hosts has 2"),
        ("--hosts a,b --coordinator a -m x", "must be host:port"),
        ("--hosts a,b", "nothing to start"),
        ("--min-processes 1 --num-nodes 2 --node-rank 1 --coordinator h:1 -m x", "--max-restarts"),
        ("--num-nodes 2 --node-rank 2 --coordinator h:1 -m x", "--node-rank 2 must be below"),
        ("--coordinator h -m x", "--coordinator='h' must be host:port"),
        ("--master-port http -m x", "must be host:port"),
        ("--coordinator h:1 --master-addr h -m x", "--coordinator replaces --master-addr"),
        ("--proces 2 -m x", "unrecognized arguments: --proces"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line(capsys, arguments, told):
    assert main(arguments.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert told in said.err
    assert said.err.startswith("jddp: ")
    assert said.err.count("\n") == 1


# Real processes of a program without JAX.


@pytest.mark.processes
def test_a_script_and_a_module_are_run_with_their_arguments(folder):
    for what in (["program.py"], ["-m", "program"]):
        # An option that the launcher knows too is the program's, behind its name.
        done = launch(folder, "--num-processes", 2, *what, "--logs", "-m", "x")
        assert done.code == 0, done.err
        said = sorted(done.out.splitlines())
        assert said == [f"[{i}] here is {i} of 2 ['--logs', '-m', 'x']" for i in range(2)]


@pytest.mark.processes
def test_a_script_can_be_launched_from_python(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    assert jddp.launch("program.py", "exit:7-1", num_processes=2, logs="logs") == 7
    assert "jddp: process 1 failed first, with exit code 7" in capfd.readouterr().err
    assert "here is 0 of 2" in (folder / "logs/process_0.log").read_text()


@pytest.mark.processes
def test_what_processes_say_is_shown_in_a_notebook_too(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # which has no bytes below it
    assert jddp.launch(folder / "program.py", num_processes=2) == 0
    assert sorted(sys.stdout.getvalue().splitlines()) == [
        f"[{i}] here is {i} of 2 []" for i in (0, 1)
    ]
    assert len(list(folder.glob("logs/*/process_1.log"))) == 1


@pytest.mark.processes
def test_the_spellings_of_torchrun_are_taken(folder):
    options = ["--nnodes", 2, "--master-addr", LOCAL, "--master-port", free_port()]
    nodes = (
        ["--nproc-per-node", 2, *options, "--node-rank", 0, "program.py"],
        ["--nproc_per_node", 2, *options, "--node_rank", 1, "program.py"],
    )
    with Launched(folder, *nodes[0]) as first, Launched(folder, *nodes[1]) as second:
        assert (first.end(), second.end()) == (0, 0), (first.err, second.err)
    for node, numbers in ((first, (0, 1)), (second, (2, 3))):
        assert sorted(node.out.splitlines()) == [f"[{i}] here is {i} of 4 []" for i in numbers]


@pytest.mark.processes
def test_a_node_that_does_not_come_is_named(folder, address):
    options = ["--num-nodes", 3, "--node-rank", 0, "--coordinator", address]
    done = launch(folder, *options, "--start-seconds", 1, "program.py")
    assert done.code == 69
    assert done.err.startswith(f"jddp: nodes 1, 2 of 3 did not connect to {address} within 1 s.")
    assert done.err.count("\n") == 1
    assert not (folder / "attempts-0").exists()


@pytest.mark.processes
@pytest.mark.parametrize("rank", [0, 1])
def test_a_launcher_that_waits_for_others_can_be_stopped(folder, address, rank):
    options = ["--num-nodes", 2, "--node-rank", rank, "--coordinator", address]
    with Launched(folder, *options, "program.py") as launched:
        until = time.monotonic() + SECONDS
        while not handles(launched.process.pid, signal.SIGTERM):
            assert time.monotonic() < until
        launched.process.send_signal(signal.SIGTERM)
        assert launched.end() == 128 + signal.SIGTERM


def handles(pid, number):
    """Whether a process has a handler of its own for a signal."""
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.processes
def test_the_first_that_fails_is_named_with_its_traceback_and_the_others_end(folder):
    done = launch(folder, "--num-processes", 3, "program.py", "raise-1", "stay-0", "stay-2")
    assert done.code == 1
    headline, *words = done.err[done.err.index("jddp: process 1") :].splitlines()
    assert re.match(r"jddp: process 1 failed first, with exit code 1, after .* s. Its", headline)
    assert words[0] == "    Traceback (most recent call last):"
    assert words[-1] == "    RuntimeError: a bug in 1"
    assert "logs/process_1.log" in headline
    assert "Traceback" in done.log(1)
    assert done.log(1).rstrip().endswith("RuntimeError: a bug in 1")
    assert_gone(folder)


@pytest.mark.processes
def test_a_worker_that_is_killed_is_named_with_the_signal(folder):
    done = launch(folder, "--num-processes", 2, "program.py", "kill-1", "stay-0")
    assert done.code == 128 + signal.SIGKILL
    assert "process 1 failed first, with signal SIGKILL (unless it was sent by hand" in done.err
    assert_gone(folder)


@pytest.mark.processes
def test_who_says_that_another_failed_first_did_not_fail_first(folder):
    done = launch(folder, "--num-processes", 2, "program.py", "exit:81-0", "once-1")
    assert done.code == 1
    assert "process 1 failed first, with exit code 1" in done.err


@pytest.mark.processes
def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace_with_what_it_started(folder):
    options = ["--num-processes", 2, "--grace-seconds", 0.2]
    done = launch(folder, *options, "program.py", "ignore-0", "child-0", "stay-0", "raise-1")
    assert done.code == 1
    assert "process 1 failed first" in done.err
    assert_gone(folder)


@pytest.mark.processes
def test_the_launcher_killed_takes_its_workers_along(folder):
    arguments = ["program.py", "ignore-0", "child-1", "stay"]
    with Launched(folder, "--num-processes", 2, *arguments) as launched:
        launched.wait_for("stays-0", "stays-1")
        launched.process.kill()
        launched.process.wait()
        assert_gone(folder)


@pytest.mark.processes
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda x: x.name
)
def test_a_signal_is_handed_on_and_ends_the_job_without_a_restart(folder, number):
    options = ["--num-processes", 2, "--max-restarts", 3]
    with Launched(folder, *options, "program.py", "stay") as launched:
        launched.wait_for("stays-0", "stays-1")
        launched.process.send_signal(number)
        code = launched.end()
        # Python turns SIGINT into an exception, and then dies of the signal.
        assert code == 128 + number, launched.err
        assert f"not restarted: {number.name} has stopped the job" in launched.err
        assert_gone(folder)


@pytest.mark.processes
def test_the_second_signal_ends_those_who_ignore_the_first(folder):
    options = ["--num-processes", 1, "--grace-seconds", 0.1]
    with Launched(folder, *options, "program.py", "ignore-0", "stay") as launched:
        launched.wait_for("ignores-0", "stays-0")
        launched.process.send_signal(signal.SIGTERM)
        time.sleep(SAME_SECONDS)  # in which a second one would be the first once more
        launched.process.send_signal(signal.SIGINT)
        assert launched.end() == 128 + signal.SIGINT, launched.err
        assert_gone(folder)


@pytest.mark.processes
def test_two_signals_at_once_are_handed_on_as_one(folder):
    with Launched(folder, "--num-processes", 1, "program.py", "ignore-0", "stay") as launched:
        launched.wait_for("ignores-0", "stays-0")
        for _ in range(2):
            launched.process.send_signal(signal.SIGTERM)
        time.sleep(SAME_SECONDS)
        assert launched.process.poll() is None  # the second would have ended it


@pytest.mark.processes
def test_all_is_kept_that_a_process_says_before_it_is_killed(folder):
    done = launch(folder, "--num-processes", 1, "program.py", "speak-0", "kill-0")
    assert done.log(0).splitlines()[1:] == ["x" * 100_000, "no end of a line"]
    assert "[0] no end of a line\n" in done.out


@pytest.mark.processes
def test_a_failure_is_followed_by_a_restart_of_all_with_a_port_and_a_word_of_its_own(folder):
    done = launch(folder, "--num-processes", 2, "--max-restarts", 2, "program.py", "once-1")
    assert done.code == 0, done.err
    assert "jddp: restart 1 of 2 in 1 s" in done.err
    attempts = [(folder / f"attempts-{i}").read_text().splitlines() for i in range(2)]
    assert attempts[0] == attempts[1]
    (first, one), (second, other) = (line.split() for line in attempts[0])
    assert first != second
    assert one != other
    assert done.log(1).count("here is 1") == 2


@pytest.mark.processes
def test_restarts_have_an_end(folder):
    done = launch(folder, "--max-restarts", 1, "program.py", "kill-0")
    assert done.code == 128 + signal.SIGKILL
    assert "not restarted: restarts allowed: 1" in done.err
    assert len((folder / "attempts-0").read_text().splitlines()) == 2


@pytest.mark.processes
def test_the_same_failure_at_once_is_not_tried_a_third_time(folder):
    done = launch(folder, "--max-restarts", 5, "program.py", "raise-0")
    assert done.code == 1
    assert "not restarted: the same failure twice, each within a minute" in done.err
    assert len((folder / "attempts-0").read_text().splitlines()) == 2


def test_a_restart_repeats_failures_of_arguments_data_memory_and_numbers():
    assert {2, 65, 77, 78, 80} == DETERMINISTIC


@pytest.mark.processes
@pytest.mark.parametrize("code", [75, 80])
def test_what_would_fail_again_is_not_tried_again(folder, code):
    done = launch(folder, "--max-restarts", 5, "program.py", f"exit:{code}-0")
    assert done.code == code
    assert "jddp: not restarted: " in done.err
    assert ("failed first" in done.err) == (code != 75)
    assert len((folder / "attempts-0").read_text().splitlines()) == 1


@pytest.mark.processes
def test_a_folder_for_logs_that_cannot_be_made_is_reported_in_one_line(folder):
    (folder / "file").touch()
    done = launch(folder, "--logs", "file/logs", "program.py")
    assert done.code == 74
    assert done.err == "jddp: --logs file/logs: Not a directory.\n"


# Jobs of jddp.


def training(folder, *options, run, arguments=(), logs=None):
    """A launcher of `jddp.train`; ended with the block."""
    train = ["-m", "jddp.train", "--config", "job.yaml", f"run.dir={run}", *arguments]
    cache, logs = (folder / "cache").read_text(), logs or f"logs-{run}"
    return Launched(folder, "--logs", logs, *options, *train, XDG_CACHE_HOME=cache)


def train(folder, *options, run, arguments=()):
    """Launches `jddp.train`, to its end."""
    with training(folder, *options, run=run, arguments=arguments) as launched:
        launched.code = launched.end()
    return launched


def result(folder, run="run"):
    """Records without times, and the step and digests of the last checkpoint."""
    steps = [path for path in (folder / run / "checkpoints").iterdir() if path.name.isdecimal()]
    last = max(steps, key=lambda path: int(path.name))
    return records(folder / run), int(last.name), json.loads((last / "arrays.json").read_text())


def assert_alike(got, want):
    """Equal but for the order in which sums over processes are made."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            is_number = isinstance(value, float)
            assert one[name] == (pytest.approx(value, rel=1e-4) if is_number else value)


TWO = ["--num-processes", 2, "--devices-per-process", 1]
FEW = ["train.num_steps=6", "train.log_every_steps=1", "mesh.num_devices=auto"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, request):
    """A user's folder, in which one process of four devices has trained a few steps."""
    folder = make_folder(tmp_path_factory.mktemp("jobs"), request.config.cache.mkdir("jobs"))
    options = ["--num-processes", 1, "--devices-per-process", 4]
    done = train(folder, *options, run="one", arguments=FEW)
    assert done.code == 0, done.err
    return folder


@pytest.mark.processes
@pytest.mark.parametrize(
    "num_processes, devices", [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_processes_train_as_one_with_as_many_devices(jobs, num_processes, devices):
    options = ["--num-processes", num_processes, "--devices-per-process", devices]
    run = f"of-{num_processes}"
    done = train(jobs, *options, run=run, arguments=FEW)
    assert done.code == 0, done.err
    assert "[0] jddp " in done.out
    assert f"job      {num_processes} processes, set by jddp.launch; process 0;" in done.out
    assert "[Gloo]" not in done.out
    assert_alike(result(jobs, run)[0], result(jobs, "one")[0])


@pytest.mark.processes
@pytest.mark.slow
def test_two_launches_at_once_do_not_connect(jobs):
    with (
        training(jobs, *TWO, run="left", arguments=FEW) as left,
        training(jobs, *TWO, run="right", arguments=FEW) as right,
    ):
        assert (left.end(), right.end()) == (0, 0), (left.err, right.err)
    assert result(jobs, "left")[2] == result(jobs, "right")[2]


SCRIPT = REPOSITORY / "tests" / "workers" / "script.py"
# JAX's shutdown barrier holds processes for 300 s. Here it is 10 s for one that is waited for, a
# few for each to leave, and what it takes to start and compile on a machine that is busy.
LONG_BEFORE_300 = 120


def run_script(folder, *arguments):
    since = time.monotonic()
    with Launched(folder, "--num-processes", 2, SCRIPT, *arguments) as launched:
        launched.out, launched.err = launched.process.communicate(timeout=LONG_BEFORE_300)
    launched.code, launched.seconds = launched.process.returncode, time.monotonic() - since
    return launched


@pytest.mark.processes
@pytest.mark.parametrize(
    "what, where, code, told",
    [
        ("raise", "loop", 1, "RuntimeError: a bug of mine"),
        pytest.param("refuse", "loop", 65, "DataError: my data are bad", marks=pytest.mark.slow),
        pytest.param("raise", "iterator", 1, "RuntimeError: a bug of mine", marks=pytest.mark.slow),
        pytest.param("raise", "callback", 1, "RuntimeError: a bug of mine", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_raises_in_one_process_ends_its_job_in_seconds(
    folder, what, where, code, told
):
    done = run_script(folder, what, where)
    assert done.code == code, done.err
    headline, *words = done.err[done.err.index("jddp: process 1 failed") :].splitlines()
    assert f"process 1 failed first, with exit code {code}" in headline
    assert words[0] == "    Traceback (most recent call last):"
    assert told in words[-1]
    assert "Check failure stack trace" not in done.err  # no abort of JAX's


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("where", ["loop", "iterator", "callback"])
def test_a_script_that_exits_in_one_process_ends_its_job_with_its_code(folder, where):
    done = run_script(folder, "exit", where)
    assert done.code == 3, done.err
    assert "jddp: process 1 failed first, with exit code 3" in done.err
    assert "process 1 on " in done.log(0)
    assert "ended too early: others still wait for it" in done.log(0)


@pytest.mark.processes
@pytest.mark.slow
def test_a_script_whose_batches_end_early_in_one_process_ends_in_seconds_with_the_reason(folder):
    done = run_script(folder, "stop", "loop")
    assert done.code == 65, done.err
    assert re.search(r"\njddp: process 1 on \S+ ended too early", done.err)
    assert "Give all as many steps and batches." in done.err


@pytest.mark.processes
@pytest.mark.slow
def test_sys_exit_while_data_are_read_ends_a_job_with_a_traceback(jobs):
    (jobs / "exit-1").touch()
    try:
        done = train(jobs, "--num-processes", 2, run="exits", arguments=FEW)
    finally:
        (jobs / "exit-1").unlink()
    assert done.code == 1
    assert "jddp: process 1 failed first, with exit code 1" in done.err
    assert "called sys.exit: SystemExit(0)" in done.err


OFTEN = ["checkpoint.every_steps=20", "train.num_steps=200"]


@pytest.fixture(scope="module")
def golden(jobs):
    """The result of two processes that nothing has disturbed."""
    assert train(jobs, *TWO, run="golden", arguments=OFTEN).code == 0
    return result(jobs, "golden")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_job_whose_process_is_killed_resumes_bitwise_identically(jobs, golden, process):
    run, options = f"killed-{process}", [*TWO, "--max-restarts", 2]
    with training(jobs, *options, run=run, arguments=OFTEN) as launched:
        launched.wait_for(f"{run}/checkpoints/60")
        os.kill(child_of(launched.process.pid, process), signal.SIGKILL)
        assert launched.end() == 0, launched.err
    assert f"process {process} failed first, with signal SIGKILL" in launched.err
    assert "jddp: restart 1 of 2" in launched.err
    assert result(jobs, run) == golden


@pytest.mark.processes
@pytest.mark.slow
def test_a_job_that_hangs_resumes_and_ends(jobs):
    soon = [*OFTEN, "watchdog.step_seconds=3"]
    with training(jobs, *TWO, "--max-restarts", 1, run="hangs", arguments=soon) as launched:
        launched.wait_for("hangs/checkpoints/60")
        (jobs / "hang-1").touch()
        until = time.monotonic() + SECONDS
        while "no progress" not in (jobs / "logs-hangs/process_1.log").read_text():
            assert time.monotonic() < until
            time.sleep(0.005)
        (jobs / "hang-1").unlink()
        assert launched.end() == 0, launched.err
    assert re.search(r"jddp: process \d failed first, with exit code 79", launched.err)
    assert result(jobs, "hangs")[1] == 200


def child_of(pid, process):
    """The worker of this number that a launcher has started."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            parent = path.with_name("stat").read_text().rpartition(")")[2].split()[1]
            if parent == str(pid) and f"JAX_PROCESS_ID={process}" in path.read_text().split("\0"):
                return int(path.parent.name)
    raise AssertionError(f"{pid} has no worker {process}")


@pytest.mark.processes
@pytest.mark.slow
def test_a_signal_to_the_launcher_saves_and_the_same_command_resumes(jobs):
    often = ["train.num_steps=400", "checkpoint.every_steps=20"]
    with training(jobs, *TWO, run="stopped", arguments=often) as launched:
        launched.wait_for("stopped/checkpoints/20")
        launched.process.send_signal(signal.SIGTERM)
        assert launched.end() == 75, launched.err
    assert "failed" not in launched.err
    done = train(jobs, *TWO, run="stopped", arguments=often)
    assert done.code == 0, done.err
    assert "resumed from step" in done.out


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.xdist_group("torch")
def test_torchrun_starts_a_job(jobs):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed: pip install -c constraints.txt -e '.[peers]'")
    variables = {"XDG_CACHE_HOME": (jobs / "cache").read_text(), "JAX_NUM_CPU_DEVICES": "2"}
    starts = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    arguments = ["-m", "jddp.train", "--config", "job.yaml", "run.dir=torchrun", *FEW]
    done = subprocess.run(
        [*starts, *arguments],
        cwd=jobs,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert "job      2 processes, set by torchrun; process 0;" in done.stdout
    assert_alike(result(jobs, "torchrun")[0], result(jobs, "one")[0])


@contextlib.contextmanager
def two_nodes(folder, run, *options, arguments):
    """Launches a job of two processes a node, on two nodes that are this machine."""
    address = f"{LOCAL}:{free_port()}"
    job = [*TWO, "--num-nodes", 2, "--coordinator", address, *options]

    def node(rank):
        about = {"run": run, "arguments": arguments, "logs": f"logs-{run}-{rank}"}
        return training(folder, *job, "--node-rank", rank, **about)

    with node(1) as second, node(0) as first:  # whoever comes first
        yield first, second


@pytest.mark.processes
@pytest.mark.slow
def test_two_nodes_train_as_one(jobs):
    with two_nodes(jobs, "nodes", arguments=FEW) as (first, second):
        assert (first.end(), second.end()) == (0, 0), (first.err, second.err)
    assert "job      4 processes, set by jddp.launch" in first.out
    assert "eval" not in second.out
    assert_alike(result(jobs, "nodes")[0], result(jobs, "one")[0])


@pytest.mark.processes
@pytest.mark.slow
def test_nodes_start_again_together(jobs):
    often = [*OFTEN, "mesh.num_devices=auto"]
    with two_nodes(jobs, "again", "--max-restarts", 1, arguments=often) as (first, second):
        first.wait_for("again/checkpoints/60")
        os.kill(child_of(second.process.pid, 3), signal.SIGKILL)
        assert (first.end(), second.end()) == (0, 0), (first.err, second.err)
    assert "jddp: process 3 failed first, with signal SIGKILL" in second.err
    assert re.search(r"jddp: process \d ended because another did, with exit code 81", first.err)
    assert "resumed from step" in first.out
    assert result(jobs, "again")[1] == 200


@pytest.mark.processes
@pytest.mark.slow
def test_a_job_continues_without_a_machine_that_is_lost_and_with_one_that_comes_or_is_stopped(
    jobs, address
):
    few = ["train.num_steps=400", "checkpoint.every_steps=20", "mesh.num_devices=auto"]
    few += ["model.kwargs={dropout_rate: 0.0}"]  # each replica would draw for itself
    whole = ["--num-processes", 1, "--devices-per-process", 4]
    assert train(jobs, *whole, run="whole", arguments=few).code == 0
    options = ["--num-nodes", 2, "--coordinator", address, "--min-processes", 1]
    options += ["--max-restarts", 2, "--devices-per-process", 2]

    def node(rank, life):
        about = {"run": "elastic", "arguments": few, "logs": f"logs-elastic-{rank}-{life}"}
        return training(jobs, *options, "--node-rank", rank, **about)

    def wait_for(text):
        log = jobs / "logs-elastic-0-0/process_0.log"
        until = time.monotonic() + SECONDS
        while not (log.exists() and text in log.read_text()):
            assert first.process.poll() is None, first.process.communicate()
            assert time.monotonic() < until
            time.sleep(0.005)

    with node(0, 0) as first, node(1, 0) as lost:
        first.wait_for("elastic/checkpoints/60")
        lost.process.kill()  # and its processes, as if the machine had lost its power
        lost.process.communicate()
        wait_for("num_processes 1 (was 2)")
        first.wait_for("elastic/checkpoints/80")
        (jobs / "hang-0").touch()
        with node(1, 1) as back:
            wait_for("SIGTERM: stopping")
            (jobs / "hang-0").unlink()
            wait_for("num_processes 2 (was 1)")
            back.process.send_signal(signal.SIGTERM)
            assert (first.end(), back.end()) == (0, 75), (first.err, back.err)
    assert "another machine has connected: stopping, to resume with it" in first.err
    assert "jddp: process 1 of 2 here" in back.err
    assert first.err.count("jddp: process 0 of 1 here") == 2
    assert "restart 1 of 2" in first.err  # what was lost; the rest was in good order
    assert "restart 2 of 2" not in first.err
    assert_alike(result(jobs, "elastic")[0], result(jobs, "whole")[0])


SILENT = """
F1122 client.h:80] Terminating process because the JAX distributed service detected fatal errors.
absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):
2
3
The tasks have crashed.

RPC: /xla.coordination.CoordinationService/PollForError [type.googleapis.com/x='']
"""
GONE = """
absl::Status: DEADLINE_EXCEEDED: Deadline Exceeded

RPC: /xla.coordination.CoordinationService/Heartbeat
"""


@pytest.mark.parametrize(
    "words, who",
    [
        (SILENT, "processes 2, 3"),
        (SILENT.replace("2\n3\n", "10\n3\n"), "processes 3, 10"),
        (SILENT.replace("\n3", ""), "process 2"),
        (GONE, "process 0"),
        ("Check failed", None),
    ],
)
def test_what_jax_says_of_a_process_that_is_silent_is_understood(words, who):
    assert lost_processes(words) == who
