"""What processes of jddp are started with in tests, and what a run leaves in its directory."""

import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

import jddp
from jddp.checkpoint import folders
from jddp.distributed.identity import VARIABLES
from jddp.distributed.worker import without_gloo

ROOT = Path(jddp.__file__).parents[1]
TIMINGS = ("step_seconds", "examples_per_second", "data_wait_seconds", "tokens_per_second")
TIMINGS += ("host_seconds",)
TIMINGS += ("model_flops_per_second", "mfu")
TIMINGS += ("peak_memory_bytes", "predicted_memory_bytes", "memory_limit_bytes")


def environment(**variables):
    """Of a process on CPUs: the jddp and the helpers of the tests, nothing of devices or jobs."""
    of_this_one = ("JAX_", "JDDP_", "XLA_", "XDG_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(of_this_one)}
    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return kept | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"} | variables


def compiling_as_here():
    """Variables by which a process compiles as cheaply as the tests, and shares their cache."""
    kept = {"XLA_FLAGS": os.environ["XLA_FLAGS"], "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return kept | {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or ""}


def run_python(*arguments, folder=None, **variables):
    """Runs Python to its end, on CPUs; returns its exit code and what it said."""
    options = {"cwd": folder, "env": environment(**variables), "capture_output": True}
    return subprocess.run([sys.executable, *map(str, arguments)], text=True, **options)


def free_port():
    """A port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def of_job(num_processes=2, **variables):
    """The variables of each process of a job on this machine."""
    address, count = f"127.0.0.1:{free_port()}", str(num_processes)
    numbers = [(address, count, str(process)) for process in range(num_processes)]
    return [variables | dict(zip(VARIABLES, each, strict=True)) for each in numbers]


def run_job(command, *of_processes):
    """Runs a command in a job of a process for each set of variables."""
    both = zip(of_job(len(of_processes)), of_processes, strict=True)
    return run_all(command, [job | variables for job, variables in both], seconds=240)


def run_module(module, folder, variables, seconds, *arguments):
    """Runs `python -m module folder arguments` once with each set of variables."""
    command = [sys.executable, "-m", module, folder, *arguments]
    ends = run_all(command, [compiling_as_here() | each for each in variables], seconds)
    return [
        (b"".join(without_gloo(said.encode().splitlines(keepends=True))).decode(), errors)
        for said, errors in ends
    ]


def run_all(command, variables, seconds):
    """Runs a command once with each set of variables; returns the texts of both streams."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen(command, env=environment(**each), **streams) for each in variables
    ]
    try:
        ends = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()  # does nothing to one that has ended
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), ends
    return ends


def wait_until(condition, *processes, said=lambda: "not in time", seconds=120, pause=0.01):
    """Waits until a condition holds, as long as the processes live; else shows what they said."""
    until = time.monotonic() + seconds
    while not condition():
        ended = [process.poll() for process in processes]
        assert set(ended) <= {None}, (ended, said())
        assert time.monotonic() < until, said()
        time.sleep(pause)


def read_proc(pid, what):
    """What Linux tells of a process, by lines; empty if it has gone."""
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().replace(b"\0", b"\n").decode()
    except OSError:
        return ""


def number_of(pid, variable="JAX_PROCESS_ID"):
    """The number of a worker in its job, as text; None for others, which inherit its variables."""
    number = re.search(f"^{variable}=(.*)", read_proc(pid, "environ"), re.M)
    is_other = "apart.py" in read_proc(pid, "cmdline") or "spare" in read_proc(pid, "comm")
    return number[1] if number and not is_other else None


def worker_of(logs, number):
    """The worker of this number whose launcher has its logs there."""
    pids = sorted(map(int, filter(str.isdigit, os.listdir("/proc"))))
    mine = [pid for pid in pids if f"={logs}/failure" in read_proc(pid, "environ")]
    return next(pid for pid in mine if number_of(pid) == str(number))


def records(run_dir):
    """What a run measured, without what depends on the machine's mood."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [{k: v for k, v in json.loads(x).items() if k not in TIMINGS} for x in lines]


def contents(path):
    """The bytes of every file below a directory."""
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def write_sealed(folder, name, text):
    """Changes a file of a checkpoint, and makes its digests hold."""
    (folder / name).write_text(text)
    (folder / folders.SUMS).unlink()
    folders.seal(folder)


def printed(capsys):
    """What was printed since this was last asked, without the ends of lines."""
    return " ".join(capsys.readouterr().out.split())


def calling(**hooks):
    """A callback of these hooks."""
    callback = jddp.Callback()
    vars(callback).update(hooks)
    return callback


def at(step, action):
    """A callback that acts on the run when this step is reported."""
    return calling(on_step=lambda run, metrics: metrics["step"] == step and action(run))


@contextlib.contextmanager
def refused(error, message):
    """Expects an error of one line."""
    with pytest.raises(error, match=message) as caught:
        yield caught
    assert "\n" not in str(caught.value)


@contextlib.contextmanager
def files_up_to(num_bytes):
    """No file of this process may become larger, as under `ulimit -f` or on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
