"""The first failure as a file, on which nothing else depends; and the end of a process after it."""

import socket
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from runs import environment

from jddp.commands.train import main
from jddp.distributed import failure, failure_file
from jddp.distributed.exits import process
from jddp.distributed.failure_file import (
    VARIABLE,
    describe_failure,
    headline,
    read_failure,
    write_failure,
)
from jddp.ground.errors import FileSystemError


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(process, "failures", None)
    monkeypatch.setattr(process, "progress", {"step": 7, "phase": "step"})


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_a_failure_has_these_fields():
    before = datetime.now(UTC)
    failure = describe_failure(1, 65, raised(ValueError("the headline\nand more")))
    trace, moment = failure.pop("traceback"), datetime.fromisoformat(failure.pop("time"))
    want = {"process": 1, "host": socket.gethostname(), "exit_code": 65, "step": 7, "phase": "step"}
    assert failure == want | {"exception": {"type": "ValueError", "message": "the headline"}}
    assert trace.startswith("Traceback (most recent call last):")
    assert trace.endswith("ValueError: the headline\nand more\n")
    assert before <= moment <= datetime.now(UTC)


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize("error", [Speechless(), ValueError("x" * 10_000), ValueError("\ud800")])
def test_a_failure_fits_a_pod_s_termination_message_whatever_the_error(tmp_path, error):
    write_failure(describe_failure(0, 1, raised(error)), tmp_path / "failure.json")
    assert 0 < (tmp_path / "failure.json").stat().st_size < 4096
    assert read_failure(tmp_path / "failure.json")["exception"]["type"] == type(error).__name__


def test_the_first_failure_stays_and_a_stopped_job_or_the_loss_of_another_are_none(tmp_path):
    path = tmp_path / "failure.json"
    for number, code in enumerate((75, 81, 1, 1)):
        write_failure(describe_failure(number, code), path)
    assert read_failure(path)["process"] == 2
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_file_such_as_a_pod_s_is_filled_and_not_replaced(tmp_path):
    path = tmp_path / "termination-log"
    path.touch()
    inode = path.stat().st_ino
    for number in (1, 0):
        write_failure(describe_failure(number, 1), path)
    assert read_failure(path)["process"] == 1
    assert path.stat().st_ino == inode


def test_the_variable_wins_over_the_file_of_a_run(tmp_path, monkeypatch):
    failure_file.begin(tmp_path)
    write_failure(describe_failure(0, 1))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "of-variable"))
    write_failure(describe_failure(1, 1))
    assert read_failure(tmp_path / "failure.json")["process"] == 0
    assert read_failure(tmp_path / "of-variable")["process"] == 1
    failure_file.begin(tmp_path)  # the run begins again
    assert read_failure(tmp_path / "failure.json") is None


def test_a_file_without_a_failure_is_none(tmp_path):
    path = tmp_path / "failure.json"
    assert read_failure(path) is None
    for text in ("", "[]", "{", "3", '{"exception": "no"}', '{"exit_code": "1"}', "[" * 10_000):
        path.write_text(text)
        assert read_failure(path) is None, text[:20]


@pytest.mark.parametrize("where", ["nowhere/failure.json", "file/failure.json", "folder", "\0"])
def test_a_path_that_cannot_be_written_changes_nothing_else(tmp_path, monkeypatch, capsys, where):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    if where != "\0":
        monkeypatch.setenv(VARIABLE, str(tmp_path / where))
        assert main(["no.such.key=1"]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    write_failure(describe_failure(0, 1), tmp_path / where)
    assert {path.name for path in tmp_path.rglob("*")} == {"file", "folder"}


def test_a_mistake_in_the_arguments_is_kept_with_the_number_of_the_process(tmp_path, monkeypatch):
    path = tmp_path / "failure.json"
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setenv("RANK", "3")
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
    assert main(["no.such.key=1"]) == 2
    failure = read_failure(path)
    assert (failure["process"], failure["exit_code"]) == (3, 2)
    assert "unknown key 'no'" in failure["exception"]["message"]


@pytest.mark.parametrize(
    "code, error, sentence",
    [
        (1, ValueError("no"), "process 1 on h failed first, with exit code 1: ValueError: no"),
        (-11, None, "process 1 on h failed first, with signal SIGSEGV"),
        (0, None, "process 1 on h ended too early, with exit code 0, while others wait"),
        (None, None, "process 1 on h ended too early, while others wait"),
        (75, None, "process 1 on h was stopped"),
    ],
)
def test_a_failure_is_a_sentence_for_people(code, error, sentence):
    assert headline(describe_failure(1, code, error, host="h")).startswith(sentence)
    assert " on h" not in headline(describe_failure(1, code, error, host=None))


NCCL = "INTERNAL: NCCL operation ncclGroupEnd() failed:"
LAST = "Last NCCL warning(error) log entry (may be unrelated)"
# Messages as in reports of jax, nccl and the programs named, or in the CUDA plugin 0.10.2.
LOST = {
    "gloo": "Connection closed by peer [127.0.0.1]:1",
    "gloo, NCCL (nccl#2076)": "Read error: Connection reset by peer",
    "gloo, NCCL (nccl#795)": "Call to recv failed : Broken pipe",
    "gRPC": "UNAVAILABLE: Socket closed",
    "jax#19307": f"{NCCL} remote process exited or there was a network error. {LAST} ''.",
    "nccl#1039": f"{NCCL} unhandled system error. {LAST} ''.",
    "nccl#795": f"{NCCL} internal error. {LAST} 'Net : Connection closed by remote peer a100'.",
    "nccl#1664": f"{NCCL} internal error. {LAST} 'NET/IB : Got completion from peer 10.0.0.1<4>'.",
    "0.10.2": "INTERNAL: NcclCommunicator aborted",
    "0.10.2, twice": "INTERNAL: NcclCommunicator already aborted",
    "Search-R1#170": "NCCL communicator was aborted on rank 0.",
    "XLA": "GetKeyValue() timed out with key: cuda:local_topology/cuda/1 and duration: 2m",
}
OWN = {
    "nccl-tests#166": f"{NCCL} unhandled system error.\n{LAST} 'Error while creating shared memory "
    "segment /dev/shm/nccl-x (size 9637888)'.",
    "jax#4950": f"{NCCL} unhandled system error. {LAST} 'Cuda failure 2 'out of memory''.",
    "nccl#1410": f"{NCCL} unhandled cuda error.",
    "nccl#103": f"{NCCL} invalid usage. {LAST} 'Duplicate GPU'.",
    "jddp": "GetKeyValue() timed out with key: jddp/save/1/0 and duration: 2m",
}


@pytest.mark.parametrize("source", [*LOST, *OWN])
def test_only_the_loss_of_another_process_is_a_consequence(source):
    assert failure._is_consequence(RuntimeError((LOST | OWN)[source])) == (source in LOST)
    assert not failure._is_consequence(FileSystemError(LOST["gloo"]))


SCRIPT = """
from jddp.distributed import initialize, resolve_identity

initialize(resolve_identity())
raise {}
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "error, code, exception",
    [
        ("ValueError('a bug')", 1, {"type": "ValueError", "message": "a bug"}),
        ("KeyboardInterrupt", 130, {"type": "KeyboardInterrupt", "message": ""}),
        ("OSError('Connection reset by peer')", None, None),
    ],
)
def test_a_script_that_asks_for_its_job_keeps_its_end(tmp_path, error, code, exception):
    environ = environment(**{VARIABLE: str(tmp_path / "failure.json")})
    command = [sys.executable, "-c", SCRIPT.format(error)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode
    assert done.stderr.count("Traceback") == 1
    failure = read_failure(tmp_path / "failure.json") or {}
    assert (failure.get("exit_code"), failure.get("exception")) == (code, exception)


@pytest.mark.processes
def test_nothing_that_knows_the_file_imports_jax():
    code = "import sys, jddp.distributed.launcher; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)
