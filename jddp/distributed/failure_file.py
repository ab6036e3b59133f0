"""The first failure of a job as data: one small JSON file, for launchers, schedulers and people.

    write_failure(describe_failure(1, ExitCode.DATA, error))   # replaces no file, raises nothing

The process that fails writes the file. A process that ends because of that failure writes the same
file, and `jddp.launch` writes it for a dead process. docs/failure_file.md describes the fields.
Nothing here imports JAX.
"""

import contextlib
import json
import os
import re
import signal
import socket
import tempfile
import traceback
from datetime import UTC, datetime
from pathlib import Path

from jddp.distributed.exits import process
from jddp.ground.errors import ExitCode
from jddp.ground.typing import JsonObject

VARIABLE, RESULT = "JDDP_FAILURE_FILE", "JDDP_RESULT_FILE"
_EARLY = "ended too early{}, while others wait for it: give all equally many steps and batches"
_HOW = {
    None: _EARLY.format(""),
    ExitCode.DONE: _EARLY.format(", with exit code 0"),
    ExitCode.PREEMPTED: "was stopped",
    ExitCode.ANOTHER_FAILED: "has lost another process, which ended without a report",
}
# Words of gloo, JAX and NCCL for a process that has ended; tests have whole messages, and sources.
LOST = (
    r"Connection closed by (?:remote )?peer|Connection reset by peer",  # gloo, NCCL's sockets
    r"Broken pipe|Socket closed",  # gloo, gRPC
    r"remote process exited or there was a network error",  # NCCL: ncclRemoteError
    # ncclSystemError: a peer's error, unless NCCL has named the missing part here.
    r"unhandled system error(?!.*(?:out of memory|shared memory|No space left))",
    r"NET/\w+ : Got completion from peer",  # NCCL over InfiniBand
    r"(?i:NCCL ?communicator (?:was |already )?aborted)",  # XLA, once NCCL has failed
    r"GetKeyValue\(\) timed out with key: \S*_topology/",  # JAX, while devices start
)
IS_LOST = re.compile("|".join(LOST), re.DOTALL)
# Messages of JAX before it aborts: it has no heartbeat of these processes, or of the coordinator.
# JAX reports this in no other form.
_SILENT = r"unhealthy \(stopped sending heartbeats\):(?:\s+\d+)+"
_CALLS = "Heartbeat|PollForError|RegisterTask"
_UNREACHABLE = rf"(?:RPC:|while calling) /\S*CoordinationService/(?:{_CALLS})"
ABORT = re.compile(f"{_SILENT}|{_UNREACHABLE}")
_NAME = "failure.json"


def begin(folder: Path | None) -> None:
    """Keeps a failure in this folder from here on, if the variable is not set; removes an old one.

    Args:
      folder: A folder in which no other process keeps a failure; None for none.
    """
    process.failures = folder
    if folder is not None:
        (folder / _NAME).unlink(missing_ok=True)


def describe_failure(
    number: int | None, exit_code: int | None, error: BaseException | None = None, **known: object
) -> JsonObject:
    """A failure as data.

    Args:
      number: Number of the process.
      exit_code: Exit code of the process, or minus a signal; None if it is not known.
      error: The exception that ends it.
      **known: Values for a process that is not this one.
    """
    if exit_code is not None and exit_code < 0:
        exit_code = 128 - exit_code
    failure: JsonObject = {"process": number, "host": socket.gethostname()}
    failure |= {"exit_code": exit_code, "exception": None, "traceback": None, **process.progress}
    failure["time"] = datetime.now(UTC).isoformat()
    if error is not None:
        found = traceback.TracebackException.from_exception(error)
        # A pod's termination message has 4,096 bytes, so only the end of a traceback is kept.
        message = str(found).strip().partition("\n")[0][:500]
        failure["exception"] = {"type": type(error).__name__, "message": message}
        failure["traceback"] = "".join(found.format())[-3000:]
    return {name: known.get(name, value) for name, value in failure.items()}


def headline(failure: JsonObject) -> str:
    """A failure in one line, for people."""
    code = failure["exit_code"]
    exception = failure["exception"] or {}
    how = _HOW.get(code, f"failed first, with exit code {code}")
    if code is not None and code - 128 in set(signal.Signals):
        how = f"failed first, with signal {signal.Signals(code - 128).name}"
        if code == 137:
            how += " (unless it was sent by hand, the machine was out of memory)"
    number = failure["process"]
    host = failure["host"]
    who = "a process on another host" if number is None else f"process {number}"
    who += f" on {host}" if host else ""
    return ": ".join([f"{who} {how}", *filter(None, exception.values())])


def write_failure(failure: JsonObject, path: Path | None = None) -> None:
    """Keeps a failure, unless there is one already; raises nothing.

    A job that was stopped, and a process that has lost another, are no first failures.

    Args:
      failure: The failure.
      path: The file; None for the file of this process, if it has one.
    """
    if path is None and (given := os.environ.get(VARIABLE)):
        path = Path(given)
    elif path is None and process.failures is not None:
        path = process.failures / _NAME
    if path is None or failure.get("exit_code") in (ExitCode.PREEMPTED, ExitCode.ANOTHER_FAILED):
        return
    with contextlib.suppress(OSError, ValueError):
        text = json.dumps(failure, indent=2) + "\n"
        if path.is_file() and not path.stat().st_size:  # A pod has such a file.
            path.write_text(text)
            return
        with tempfile.NamedTemporaryFile(dir=path.parent) as new:
            Path(new.name).write_text(text)
            os.link(new.name, path)  # This fails if another was first.


def read_failure(path: Path) -> JsonObject | None:
    """The failure in a file; None if there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        failure = describe_failure(None, None) | json.loads(path.read_text())
        return failure if headline(failure) else None  # `headline` raises for other fields.
    return None
