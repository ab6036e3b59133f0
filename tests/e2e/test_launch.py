"""The launcher starts processes, says who failed first, restarts them, and leaves none behind."""

import importlib.util
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults.jobs import FEW, assert_alike, result, saved_steps, train_command, variables_of
from runs import compiling_as_here, environment, free_port, read_proc, wait_until, worker_of

import jddp
from jddp.commands.launch import _parser, main, plan_launch
from jddp.distributed.failure import owned_process
from jddp.distributed.group import Launch, Place, environments, split_gpus
from jddp.distributed.identity import resolve_identity
from jddp.distributed.launcher import Nodes
from jddp.distributed.signals import SAME_SECONDS
from jddp.ground.errors import ConfigError, CoordinatorError
from jddp.workbench.facts import read_history
from jddp.workbench.trace import read_trace

SECONDS = 60  # for what takes a few
HOST, LOCAL = socket.gethostname(), "127.0.0.1"
# A program without JAX: what the launcher does is the same to it.
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path

me = os.environ["JAX_PROCESS_ID"]
told = [x.removesuffix(f"-{me}") for x in sys.argv if x == "stay" or x.endswith(f"-{me}")]
Path(f"own-{me}").write_text(str(os.getpid()))
Path(f"own-{me}").rename(f"pid-{me}")  # never there without its number
print("here is", me, "of", os.environ["JAX_NUM_PROCESSES"], sys.argv[1:])
with open("attempts-" + me, "a") as attempts:
    attempts.write(" ".join(os.environ[x] for x in ("JAX_COORDINATOR_ADDRESS", "JDDP_JOB")) + "\\n")
for what, _, code in (x.partition(":") for x in told):
    if what == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(f"ignores-{me}").touch()
    elif what == "save":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    elif what == "write":
        failure = {"process": 5, "host": "h5", "exit_code": 65, "traceback": "Trace of process 5"}
        failure["exception"] = {"type": "DataError", "message": "bad"}
        Path(os.environ["JDDP_FAILURE_FILE"]).write_text(json.dumps(failure))
    elif what == "speak":
        sys.stdout.write("x" * 100_000 + "\\nno end of a line")
        sys.stdout.flush()
    elif what == "exit":
        sys.exit(int(code))
    elif what == "once" and not Path("done").exists():
        Path("done").touch()
        sys.exit(1)
    elif what == "raise":
        raise RuntimeError("a bug in " + me)
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "child":
        os.fork()
        Path(f"child-{me}-{os.getpid()}").touch()
    elif what == "stay":
        Path(f"stays-{me}").touch()
        time.sleep(100)
"""


class Launched:
    """`python -m jddp.launch` in a folder; ended with the block, by force if need be."""

    seconds = SECONDS

    def __init__(self, folder, *arguments, **variables):
        command = [sys.executable, "-m", "jddp.launch", "--logs", "logs", *map(str, arguments)]
        self.folder, pipes = folder, {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        env = environment(**variables)
        self.process = subprocess.Popen(command, cwd=folder, env=env, text=True, **pipes)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        self.process.kill()  # does nothing to one that has ended
        return self.process.communicate()

    def end(self, seconds=None):
        """Waits for its end; returns its exit code."""
        self.out, self.err = self.process.communicate(timeout=seconds or self.seconds)
        return self.process.returncode

    def wait_until(self, condition):
        """Waits until a condition holds, as long as it lives."""
        about = {"said": self.kill, "seconds": 2 * self.seconds, "pause": 0.005}
        wait_until(condition, self.process, **about)

    def wait_for(self, *names):
        """Waits until a program has made files of these names."""
        self.wait_until(lambda: all((self.folder / name).exists() for name in names))

    def wait_for_step(self, run, step):
        """Waits until a run has saved this step, or a later one."""
        self.wait_until(lambda: max(saved_steps(self.folder / run), default=0) >= step)

    def wait_for_words(self, name, words):
        path = self.folder / name
        self.wait_until(lambda: path.exists() and words in path.read_text())

    def failure(self, logs="logs"):
        """The first failure, as its file has it."""
        (path,) = (self.folder / logs).glob("failure_*.json")
        return json.loads(path.read_text())

    def log(self, process, logs="logs"):
        return (self.folder / logs / f"process_{process}.log").read_text()


def launch(folder, *arguments, **variables):
    """Runs one to its end."""
    with Launched(folder, *arguments, **variables) as launched:
        launched.code = launched.end()
    return launched


def failed(process, how):
    """How a launcher names the process here that failed first."""
    return f"process {process} on {HOST} failed first, with {how}"


def assert_gone(folder):
    """No process is left of those that have written down their number."""
    pids = [int(path.read_text()) for path in folder.glob("pid-*")]
    pids += [int(path.name.split("-")[2]) for path in folder.glob("child-*")]
    assert pids
    wait_until(lambda: not any(map(is_alive, pids)), seconds=5)


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the second, if it ends while it is read
        return False
    return state != "Z"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


# What a launch decides before it starts anything.


def test_each_process_is_given_its_number():
    launch = Launch(("x.py",), 2, devices_per_process=3)
    found = environments(launch, Place("h:1", num_processes=4, first=2, job="word"), {"A": "1"})
    for number, environ in zip(("2", "3"), found, strict=True):
        want = {"A": "1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": number, "JDDP_JOB": "word"}
        want |= {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_CPU_DEVICES": "3"}
        assert want.items() <= environ.items()
        assert "CUDA_VISIBLE_DEVICES" not in environ
        assert resolve_identity(environ).num_processes == 4


def node(rank, address, num_nodes=2):
    """Options of the launcher of one node."""
    return ["--num-nodes", num_nodes, "--node-rank", rank, "--coordinator", address]


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
        (3, None, "0,1", 2, "3 processes need .* 2 GPUs are visible: 0,1"),
        (2, 2, "0,1", 2, "2 processes need .* 2 GPUs are visible: 0,1"),
    ],
)
def test_processes_share_the_gpus_that_are_visible_unless_they_are_for_cpus(
    num_processes, devices, visible, num_there, shares
):
    launch = Launch(("x.py",), num_processes, devices_per_process=devices)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    if isinstance(shares, list):
        assert split_gpus(launch, environ, num_there) == shares
    else:
        with pytest.raises(ConfigError, match=shares):
            split_gpus(launch, environ, num_there)
    on_cpus = environ | {"JAX_PLATFORMS": "cpu"}
    assert split_gpus(launch, on_cpus, num_there) == [None] * num_processes


def test_processes_share_the_gpus_of_amd_that_are_listed(monkeypatch):
    monkeypatch.setattr("jddp.distributed.group.num_nvidia", lambda: 0)
    environ = {"HIP_VISIBLE_DEVICES": "4,5"}
    made = environments(Launch(("x.py",), 2), Place("a:1", 2, 0, "job"), environ)
    assert [own["HIP_VISIBLE_DEVICES"] for own in made] == ["4", "5"]


def test_the_spellings_of_torchrun_are_taken():
    words = "--nproc_per_node 2 --nnodes 2 --master-addr h --master-port 1 --node_rank 1 -m x"
    launch = plan_launch(_parser().parse_args(words.split()))
    assert (launch.num_processes, launch.num_nodes, launch.node_rank) == (2, 2, 1)
    assert launch.coordinator == "h:1"


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_port_that_is_taken_is_refused(num_nodes):
    with socket.create_server((LOCAL, 0)) as taken:
        address = f"{LOCAL}:{taken.getsockname()[1]}"
        with pytest.raises(CoordinatorError, match="is taken. Give all processes") as caught:
            Nodes(Launch(("x.py",), 1, num_nodes, 0, address), {}).gather()
    assert caught.value.exit_code == 69


@pytest.mark.parametrize(
    "arguments, reported",
    [
        ("", "nothing to start"),
        ("nowhere.py", "there is no script 'nowhere.py'"),
        ("--num-processes two -m x", "'two' is not a number from 1 up"),
        ("--num-nodes 2 -m x", "--num-nodes 2 needs --coordinator host:port"),
        ("--num-nodes 2 --coordinator h:1 -m x", "and --node-rank, which differs on each node"),
        ("--min-processes 1 --max-restarts 1 -m x", "--min-processes needs --ray"),
        ("--ray --num-nodes 2 --node-rank 0 --coordinator h:1 -m x", "--ray places all processes"),
        ("--num-nodes 2 --node-rank 2 --coordinator h:1 -m x", "--node-rank 2 must be below"),
        ("--coordinator h -m x", "--coordinator='h' must be host:port"),
        ("--coordinator h:1 --master-addr h -m x", "--coordinator replaces --master-addr"),
        ("--proces 2 -m x", "unrecognized arguments: --proces"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line(capsys, arguments, reported):
    assert main(arguments.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert reported in said.err
    assert said.err.startswith("jddp: ")
    assert said.err.count("\n") == 1


def test_an_exit_by_the_code_of_a_user_is_an_error_of_its_command():
    with pytest.raises(RuntimeError, match=r"called sys.exit: SystemExit\(0\)"), owned_process():
        sys.exit(0)


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
def test_a_script_can_be_launched_from_python_and_from_a_notebook(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # which has no bytes below it
    assert jddp.launch(folder / "program.py", "exit:7-1", num_processes=2) == 7
    assert failed(1, "exit code 7") in capfd.readouterr().err
    said = [f"[{i}] here is {i} of 2 ['exit:7-1']" for i in (0, 1)]
    assert sorted(sys.stdout.getvalue().splitlines()) == said
    assert len(list(folder.glob("logs/*/process_1.log"))) == 1


@pytest.mark.processes
def test_a_node_that_does_not_come_is_named(folder, address):
    done = launch(folder, *node(0, address, 3), "--start-seconds", 1, "program.py")
    assert done.code == 69
    assert done.err.startswith(f"jddp: nodes 1, 2 of 3 did not connect to {address} within 1 s.")
    assert done.err.count("\n") == 1
    assert not (folder / "attempts-0").exists()


BUG = ["Traceback (most recent call last):", "RuntimeError: a bug in 1"]
OTHERS = "process 5 on h5 failed first, with exit code 65: DataError: bad (after "


@pytest.mark.processes
@pytest.mark.parametrize(
    "program, code, first, words",
    [
        ("raise-1 stay-0", 1, failed(1, "exit code 1 (after "), BUG),
        ("raise-1 ignore-0 child-0 stay-0", 1, failed(1, "exit code 1 (after "), BUG),
        ("once-1 exit:81-0", 1, failed(1, "exit code 1 (after "), []),
        ("speak-1 kill-1 stay-0", 137, failed(1, "signal SIGKILL (unless it was sent by hand"), []),
        # As process 0 writes it, which ends because of process 5 on another machine.
        ("write-0 exit:81-0 stay-1", 65, OTHERS, ["Trace of process 5"] * 2),
    ],
)
def test_the_first_to_fail_is_named_with_its_trace_and_all_end(folder, program, code, first, words):
    options = ["--num-processes", 2, "--grace-seconds", 0.2]
    done = launch(folder, *options, "program.py", *program.split())
    assert done.code == code, done.err
    headline, *trace = done.err[done.err.index(f"jddp: {first}") :].splitlines()
    assert [*trace[:1], *trace[-1:]] == [f"    {line}" for line in words]
    assert ("logs/process_1.log" in headline) == (code != 65)
    assert words == [] or code == 65 or done.log(1).rstrip().endswith(words[-1])
    assert done.failure()["process"] == (5 if code == 65 else 1)
    if code == 137:  # All that it said is kept.
        assert done.log(1).splitlines()[1:] == ["x" * 100_000, "no end of a line"]
        assert "[1] no end of a line\n" in done.out
        assert (done.failure()["exit_code"], done.failure()["exception"]) == (137, None)
    assert_gone(folder)


@pytest.mark.processes
def test_a_launcher_killed_leaves_no_process_on_any_node(folder, address):
    program = ["program.py", "stay", "ignore-0", "child-0", "ignore-1", "child-1"]
    grace = ["--grace-seconds", 0.2]
    with (
        Launched(folder, *node(0, address), *grace, *program) as first,
        Launched(folder, *node(1, address), *grace, *program) as second,
    ):
        first.wait_for("stays-0", "stays-1")
        first.process.kill()
        assert second.end() == 81
        assert "jddp: node 0 was lost." in second.err
        assert_gone(folder)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_is_handed_on_and_ends_the_job_without_a_restart(folder, name):
    options = ["--num-processes", 2, "--max-restarts", 3]
    with Launched(folder, *options, "program.py", "stay") as launched:
        launched.wait_for("stays-0", "stays-1")
        launched.process.send_signal(number := signal.Signals[name])
        # Python turns SIGINT into an exception, and then dies of the signal.
        assert launched.end() == 128 + number, launched.err
        assert f"not restarted: {name} has stopped the job" in launched.err
        assert_gone(folder)


@pytest.mark.processes
def test_two_signals_at_once_are_one_and_the_second_ends_those_who_ignore_the_first(folder):
    options = ["--num-processes", 1, "--grace-seconds", SECONDS]
    with Launched(folder, *options, "program.py", "ignore-0", "stay") as launched:
        launched.wait_for("ignores-0", "stays-0")
        for _ in range(2):
            launched.process.send_signal(signal.SIGTERM)
        time.sleep(SAME_SECONDS)  # in which a second one is the first once more
        assert launched.process.poll() is None
        launched.process.send_signal(signal.SIGINT)
        assert launched.end() == 128 + signal.SIGINT, launched.err
        assert_gone(folder)


@pytest.mark.processes
def test_a_job_that_does_not_end_is_killed_when_the_grace_after_one_signal_is_over(folder):
    options = ["--num-processes", 2, "--max-restarts", 3, "--grace-seconds", 0.5]
    with Launched(folder, *options, "program.py", "ignore-0", "save-1", "stay") as launched:
        launched.wait_for("stays-0", "stays-1")
        os.kill(int((folder / "pid-1").read_text()), signal.SIGSTOP)  # which could save otherwise
        launched.process.send_signal(signal.SIGTERM)
        assert launched.end() == 128 + signal.SIGTERM, launched.err
        killed = "SIGTERM: killed after --grace-seconds, because it had not ended: process 0, "
        killed += "process 1."
        assert killed in launched.err
        assert "not restarted: SIGTERM has stopped the job" in launched.err
        assert launched.failure()["exception"]["message"] == killed
        assert_gone(folder)


@pytest.mark.processes
def test_a_failure_is_kept_and_followed_by_a_restart_of_all_with_a_port_and_word_of_its_own(folder):
    kept = folder / "kept.json"
    options = ["--num-processes", 2, "--max-restarts", 2]
    done = launch(folder, *options, "program.py", "once-1", JDDP_FAILURE_FILE=str(kept))
    assert done.code == 0, done.err
    assert "jddp: restart 1 of 2 " in done.err
    attempts = [(folder / f"attempts-{i}").read_text().splitlines() for i in range(2)]
    assert attempts[0] == attempts[1]
    (address, job), (next_address, next_job) = (line.split() for line in attempts[0])
    assert (address != next_address, job != next_job) == (True, True)
    assert done.log(1).count("here is 1") == 2
    assert done.failure()["exit_code"] == 1
    assert not kept.exists()  # the job has succeeded


@pytest.mark.processes
@pytest.mark.parametrize(
    "most, what, code, num_attempts, reason",
    [
        (1, "kill-0", 128 + signal.SIGKILL, 2, "restarts allowed: 1"),
        (5, "exit:75-0", 75, 1, "it was stopped by a signal"),
        (5, "exit:80-0", 80, 1, "exit code 80 would repeat"),
    ],
)
def test_restarts_end_and_the_last_failure_is_kept(folder, most, what, code, num_attempts, reason):
    kept, options = folder / "kept.json", ["--max-restarts", most]
    done = launch(folder, *options, "program.py", what, JDDP_FAILURE_FILE=str(kept))
    assert done.code == code
    assert f"jddp: not restarted: {reason}" in done.err
    assert ("failed first" in done.err) == (code != 75)
    assert not kept.exists() if code == 75 else json.loads(kept.read_text())["exit_code"] == code
    assert len((folder / "attempts-0").read_text().splitlines()) == num_attempts


@pytest.mark.processes
def test_a_folder_for_logs_of_no_use_is_refused_and_a_full_disk_costs_the_log_alone(folder):
    (folder / "file").touch()
    done = launch(folder, "--logs", "file/logs", "program.py")
    assert done.code == 74
    assert done.err == "jddp: --logs file/logs: Not a directory.\n"
    (folder / "logs").mkdir()
    (folder / "logs" / "process_0.log").symlink_to("/dev/full")
    done = launch(folder, "program.py", "speak-0")
    assert done.code == 0, done.err
    assert done.out.endswith("[0] no end of a line\n")
    full = "logs/process_0.log: No space left on device. The rest is only in the terminal."
    assert done.err.count(full) == 1


# Jobs of jddp.


def training(folder, *options, run, arguments=(), logs=None, **variables):
    """A launcher of `jddp.train`; ended with the block."""
    command = ["--logs", logs or f"logs-{run}", *options, *train_command(run, *arguments)[1:]]
    return Launched(folder, *command, **variables_of(folder, **variables))


def train(folder, *options, run, arguments=()):
    """Launches `jddp.train`, to its end."""
    with training(folder, *options, run=run, arguments=arguments) as launched:
        launched.code = launched.end()
    return launched


TWO = ["--num-processes", 2, "--devices-per-process", 1]


@pytest.mark.processes
def test_processes_train_as_one_with_as_many_devices(jobs, one):
    arguments = [*FEW, "train.profile_steps=[2,3]"]  # which changes no step
    options = ["--num-processes", 2, "--devices-per-process", 2]
    done = train(jobs, *options, run="two", arguments=arguments)
    assert done.code == 0, done.err
    assert "[0] jddp " in done.out
    assert "job      2 processes, set by jddp.launch; process 0;" in done.out
    assert "[Gloo]" not in done.out
    assert_alike(result(jobs, "two")[0], one)
    trace = read_trace(jobs / "two")
    assert trace.steps == (2, 3)
    assert {name.split()[0] for name in trace.devices} == {"process_0", "process_1"}
    assert len(trace.devices) == 4


WAITS = """
import os
import signal

from jddp.distributed import initialize, resolve_identity
from jddp.distributed.coordination import gather, process_index

initialize(resolve_identity())
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in a run, which would save
gather("begun", "", timeout_seconds=60)
open(f"begun-{process_index()}", "w").close()
if process_index() == 1 and os.path.exists("hold"):
    signal.pause()
if process_index() == 1 and os.path.exists("kill"):
    os.unlink("kill")
    os.kill(os.getpid(), signal.SIGKILL)
gather("save", "", timeout_seconds=600)
"""


@pytest.fixture
def waits(folder, address):
    """Starts the launcher of one node of two, whose processes wait for each other."""
    (folder / "waits.py").write_text(WAITS)

    def start(rank, *options):
        options = (*options, *node(rank, address), "--logs", f"logs-{rank}")
        return Launched(folder, *options, "--grace-seconds", 10 * SECONDS, "waits.py")

    return start


@pytest.mark.processes
@pytest.mark.parametrize("num_restarts", [0, 1])
def test_processes_waiting_for_one_killed_on_another_node_end_soon_too(folder, waits, num_restarts):
    (folder / "kill").touch()
    both = [waits(rank, "--max-restarts", num_restarts) for rank in (0, 1)]
    with both[0] as first, both[1] as second:
        codes = {0: 137, 1: 0}
        assert (first.end(), second.end()) == (codes[num_restarts],) * 2, (first.err, second.err)
    for launched in (first, second):
        assert f"jddp: {failed(1, 'signal SIGKILL')}" in launched.err
    assert failed(1, "signal SIGKILL") in first.log(0, "logs-0")
    assert first.failure("logs-0")["process"] == 1
    assert "was lost" not in first.err


@pytest.mark.processes
def test_who_waits_for_a_machine_whose_launcher_was_lost_ends_long_before_the_grace(folder, waits):
    (folder / "hold").touch()
    with waits(0) as first, waits(1) as lost:
        first.wait_for("begun-0", "begun-1")
        lost.kill()
        assert first.end() == 81, first.err
    assert "jddp: node 1 was lost." in first.err
    assert "jddp.launch: node 1 was lost" in first.log(0, "logs-0")
    assert first.failure("logs-0")["exception"]["message"] == "node 1 was lost."


@pytest.mark.processes
@pytest.mark.slow
def test_a_job_killed_in_each_process_hung_and_signalled_resumes_bitwise_identically(jobs, golden):
    about = {"run": "disturbed", "arguments": ["train.num_steps=600", "checkpoint.every_steps=20"]}
    soon = {**about, "arguments": [*about["arguments"], "watchdog.step_seconds=5"]}
    with training(jobs, *TWO, "--max-restarts", 3, **soon) as launched:
        for process, step in ((0, 40), (1, 120)):
            launched.wait_for_step("disturbed", step)
            os.kill(worker_of(jobs / "logs-disturbed", process), signal.SIGKILL)
        launched.wait_for_step("disturbed", 200)
        assert read_proc(worker_of(jobs / "logs-disturbed", 1), "comm") == "jddp-worker\n"
        (jobs / "hang-1").touch()
        launched.wait_for_words("logs-disturbed/process_1.log", "no progress")
        (jobs / "hang-1").unlink()
        launched.wait_for_step("disturbed", 280)
        launched.process.send_signal(signal.SIGTERM)
        assert launched.end() == 75, launched.err
    killed = [f"jddp: {failed(process, 'signal SIGKILL')}" for process in (0, 1)]
    reported = [*killed, f"jddp: {failed(1, 'exit code 79')}"]
    places = [launched.err.index(words) for words in reported]
    assert places == sorted(places)
    own = [line for line in launched.err.splitlines() if line.startswith("jddp: process")]
    assert sum("failed first" in line for line in own) == 3  # the signal is no failure
    done = train(jobs, *TWO, **about)
    assert done.code == 0, done.err
    assert "resumed from step" in done.out
    costs = read_history(jobs / "disturbed" / "logs" / "events.jsonl").costs
    assert [cost.start_seconds > 0 for cost in costs] == [True, True, True, False]
    undisturbed = golden("train.num_steps=600", num_processes=2)
    assert result(jobs, "disturbed") == result(undisturbed.run_dir, ".")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.xdist_group("torch")
def test_torchrun_starts_a_job(jobs, one):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed: pip install -c constraints.txt -e '.[peers]'")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += train_command("torchrun", *FEW)[1:]
    how = {"env": variables_of(jobs, JAX_NUM_CPU_DEVICES="2"), "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=jobs, timeout=SECONDS, **how)
    assert done.returncode == 0, done.stderr
    assert "job      2 processes, set by torchrun; process 0;" in done.stdout
    assert_alike(result(jobs, "torchrun")[0], one)


ENDS = {"raise": (1, 1), "exit": (3, 3), "stop": (65, 0)}  # the codes of launcher and process


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_a_script_that_ends_in_one_process_ends_its_job_in_seconds_beside_others(folder, how):
    with Launched(folder, *TWO, "-m", "workers.leaves", how, 1, **compiling_as_here()) as done:
        assert done.end(150) == ENDS[how][0], done.err
    failure = done.failure()
    assert (failure["process"], failure["exit_code"]) == (1, ENDS[how][1])
    if how == "raise":
        assert failure["exception"] == {"type": "RuntimeError", "message": "a bug of mine"}
        assert (failure["phase"], failure["step"]) == ("step", 4)
        trace = done.err[done.err.index(f"jddp: {failed(1, 'exit code 1: RuntimeError')}") :]
        assert trace.rstrip().endswith("RuntimeError: a bug of mine")
    else:
        early = f"process 1 on {HOST} ended too early, with exit code 0"
        assert (failed(1, "exit code 3") if how == "exit" else early) in done.err
        assert f"jddp: process 1 on {HOST} ended too early, while others wait" in done.log(0)


CALL = "RPC: /xla.coordination.CoordinationService/"
SILENT = "UNAVAILABLE: unhealthy (stopped sending heartbeats):\n2\n3\nThe tasks have crashed.\n"


@pytest.mark.processes
@pytest.mark.parametrize(
    "said, code, how",
    [
        (SILENT, 81, "JAX: unhealthy (stopped sending heartbeats): 2 3 (after "),
        (f"UNKNOWN\n{CALL}PollForError [x]\n", 81, f"JAX: {CALL}PollForError (after "),
        ("Check failed", 128 + signal.SIGABRT, "failed first, with signal SIGABRT (after "),
    ],
)
def test_an_abort_of_jax_because_of_another_process_is_no_first_failure(folder, said, code, how):
    program = f"import os, sys\nsys.stderr.write({said!r})\nsys.stderr.flush()\nos.abort()\n"
    (folder / "aborts.py").write_text(program)
    done = launch(folder, "aborts.py")
    assert done.code == code, done.err
    assert how in done.err
    assert (code == 81) == (not list(folder.glob("logs/failure_*.json")))
