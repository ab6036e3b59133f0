"""Kills runs of `jddp.train`: a whole run, which resumes, and one process of several.

These parts start processes and use no device themselves.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from acceptance.result import Machine, PartResult
from jddp.checkpoint.folders import finished
from jddp.distributed.gpus import run_program
from jddp.inspection.doctor import BAD, OK, WARN

_CACHE = "XDG_CACHE_HOME"
_SIZES = {"gpu": (4, 128, 128, 1500), "cpu": (1, 32, 16, 90)}  # layers, width, tokens, steps
_SOON = 30  # seconds in which a job ends after one of its processes has ended
_FREE_SECONDS, _FREE_MIB = 10, 1024
_LAST_LINES = 12
# Without a scatter, deterministic kernels need no serial loop.
_MODEL = "a GPT with embedding_gradient=one_hot, which has no scatter"


def kill_and_resume(machine: Machine) -> PartResult:
    """Trains once, and once with a SIGKILL; compares the last states bitwise.

    Each of the three starts has its own empty cache of compiled programs.
    """
    with TemporaryDirectory(prefix="jddp-") as name:
        folder = Path(name)
        train = _train(machine, folder)
        whole, killed = folder / "whole", folder / "killed"
        _start(folder, *train, f"run.dir={whole}").communicate()
        with _start(folder, *train, f"run.dir={killed}", cache="b") as process:
            _wait(lambda: process.poll() is not None or bool(steps_of(killed)))
            process.kill()
        at = max(steps_of(killed), default=0)
        resumed = _start(folder, *train, f"run.dir={killed}", cache="c")
        text = resumed.communicate()[0].decode(errors="replace")
        wanted, found = last_arrays(whole), last_arrays(killed)
    level, what = OK, f"killed after step {at} and resumed: bitwise identical"
    if not wanted:
        level, what = BAD, "training fails"
    elif found != wanted:
        level, what = BAD, what.replace("bitwise", "NOT bitwise")
    elif process.returncode >= 0 or f"resumed from step {at} " not in text:
        level, what = WARN, "the run ended before it could be killed: nothing was resumed"
    last = "\n".join(text.splitlines()[-(1 if level == OK else _LAST_LINES) :])
    words = f"Trained: {_MODEL}. Each start has its own cache, and compiles."
    return PartResult(level, what, details=f"{words}\n\n```text\n{last}\n```")


def kill_one(machine: Machine) -> PartResult:
    """Kills one process of a job: the others must end, with one first failure."""
    num, before = machine.num_devices if machine.is_gpu else 2, _used_mib()
    with TemporaryDirectory(prefix="jddp-") as name:
        folder = Path(name)
        run = folder / "run"
        words = ["jddp.launch", f"--num-processes={num}", "--devices-per-process=1"]
        words += [f"--logs={folder}/logs", "-m", *_train(machine, folder, num), f"run.dir={run}"]
        with _start(folder, *words) as launcher:
            _wait(lambda: launcher.poll() is not None or bool(steps_of(run)))
            for pid in _processes(folder, f"JAX_PROCESS_ID={num - 1}")[:1]:
                os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            output = launcher.communicate()[0].decode(errors="replace")
            seconds = time.monotonic() - began
        _wait(lambda: not _processes(folder) and _used_mib() <= before + _FREE_MIB, _FREE_SECONDS)
        left = len(_processes(folder))
    first = {int(number) for number in re.findall(r"process (\d+)\b.* failed first", output)}
    wrong = {
        f"first failures of processes {sorted(first)}, not of {num - 1}": first != {num - 1},
        f"the launcher exits with {launcher.returncode}, not 137": launcher.returncode != 137,
        f"{left} processes are left": left,
        "memory of the GPUs is not free": _used_mib() > before + _FREE_MIB,
    }
    found = [what for what, is_wrong in wrong.items() if is_wrong]
    what = f"{num} processes ended in {seconds:.1f} s, exit code {launcher.returncode}, none left"
    lines = output.splitlines()
    if found:
        level = BAD
    else:
        level = WARN if seconds > _SOON else OK
        lines = [line for line in lines if line.startswith("jddp: ")]
    last = "\n".join(lines[-_LAST_LINES:])
    return PartResult(level, "; ".join(found) or what, details=f"```text\n{last}\n```")


def steps_of(run: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    folder = run / "checkpoints"
    return finished(folder) if folder.is_dir() else []


def last_arrays(run: Path) -> dict[str, object]:
    """Shapes, dtypes and digests of the arrays of a run's last checkpoint; empty if it has none."""
    if not (steps := steps_of(run)):
        return {}
    return json.loads((run / "checkpoints" / str(steps[-1]) / "arrays.json").read_text())


def _train(machine: Machine, folder: Path, num_devices: int | None = None) -> list[str]:
    """Writes random tokens; returns the arguments that train the GPT on them."""
    layers, width, length, steps = _SIZES[machine.platform]
    rng = np.random.default_rng(0)
    for name, rows in (("train", 1024), ("test", 8)):
        np.save(folder / f"{name}.npy", rng.integers(256, size=rows * length, dtype=np.uint16))
    sizes = {"num_layers": layers, "width": width, "max_length": length}
    kwargs = {**sizes, "num_heads": 2, "embedding_gradient": "one_hot", "vocab_size": 256}
    return [
        *("jddp.train", "--config", "gpt_stdlib", f"train.num_steps={steps}"),
        *("data.name=tokens", f"data.dir={folder}", f"data.kwargs.sequence_length={length}"),
        f"data.global_batch_size={4 * (num_devices or machine.num_devices)}",
        f"checkpoint.every_steps={steps // 3}",
        *(f"model.kwargs.{name}={value}" for name, value in kwargs.items()),
    ]


def _start(folder: Path, *words: str, cache: str = "a") -> subprocess.Popen[bytes]:
    env = {**os.environ, _CACHE: str(folder / cache)}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)  # which would be shared
    command = [sys.executable, "-m", *words]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _wait(condition: Callable[[], bool], seconds: float = 600) -> None:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)


def _processes(folder: Path, *variables: str) -> list[int]:
    """The processes of a run that have these variables, older ones first."""
    wanted, found = {f"{_CACHE}={folder}/a", *variables}, list[int]()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is of another user
            if wanted <= set(path.read_text(errors="replace").split("\0")):
                found.append(int(path.parent.name))
    return sorted(found)


def _used_mib() -> int:
    lines = run_program("--query-gpu=memory.used", "--format=csv,noheader,nounits")
    return sum(int(line) for line in lines if line.isdecimal())
