"""Times what a launcher adds: before the first line, and between a death and the resumption.

    JAX_PLATFORMS=cpu python benchmarks/launch.py
    JAX_PLATFORMS=cpu python benchmarks/launch.py --only start --rounds 9

    start     seconds from the start of a launcher of four processes to the first line of the last
              of them, less what the same program takes by itself: `jddp.launch`, and torchrun
              where PyTorch is installed
    death     seconds from the `kill -9` of one of two processes, which know nothing of JAX, to the
              line that names it, and to the end of the launcher
    restart   the same with the default job on two processes, to its next finished step; what
              it compiles has been compiled before

Contenders take turns; a figure is the median over the rounds. The last line is JSON.
"""

import contextlib
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from overhead import last_step, print_figures, wait_until

SPEAK = "import os; print('here', os.environ.get('RANK', os.environ.get('JAX_PROCESS_ID')))"
STAY = "import os, time\nprint('pid', os.getpid())\ntime.sleep(600)\n"
LAUNCH = [sys.executable, "-m", "jddp.launch"]
LAUNCHERS = {"jddp.launch": [*LAUNCH, "--num-processes", "4"]}
if importlib.util.find_spec("torch") is not None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    LAUNCHERS["torchrun"] = torchrun


def start(num_rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "speak.py").write_text(SPEAK)
        alone, seconds = [], {name: [] for name in LAUNCHERS}
        for _ in range(num_rounds):
            alone.append(until_lines([sys.executable, "speak.py"], 1, folder))
            for name, command in LAUNCHERS.items():
                seconds[name].append(until_lines([*command, "speak.py"], 4, folder))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    itself = statistics.median(alone)
    return {"the program by itself": itself} | {
        f"{name}, more than that": median - itself for name, median in medians.items()
    }


def until_lines(command: list[str], count: int, folder: str) -> float:
    """Seconds until a command has printed "here" so often; torchrun mixes the words of lines."""
    since = time.perf_counter()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=folder, text=True, **pipes) as process:
        assert process.stdout is not None
        for line in process.stdout:
            count -= line.count("here")
            if count <= 0:
                seconds = time.perf_counter() - since
                break
    return seconds


def death(num_rounds: int) -> dict[str, float]:
    named, ended = [], []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "stay.py").write_text(STAY)
        command = [*LAUNCH, "--num-processes", "2", "stay.py"]
        for _ in range(num_rounds):
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            with subprocess.Popen(command, cwd=folder, text=True, **pipes) as process:
                pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
                since = time.perf_counter()
                os.kill(pids[0], signal.SIGKILL)
                for line in process.stderr:
                    if "failed first, with signal SIGKILL" in line:
                        named.append(time.perf_counter() - since)
                process.wait()
                ended.append(time.perf_counter() - since)
    return {
        "to the line that names it": statistics.median(named),
        "longest": max(named),
        "to the end of all": statistics.median(ended),
    }


def restart(num_rounds: int) -> dict[str, float]:
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        command = [*LAUNCH, "--num-processes", "2", "--max-restarts", "1"]
        command += ["--logs", f"{folder}/logs", "-m", "jddp.train", f"run.dir={folder}/run"]
        command += ["train.log_every_steps=1", "checkpoint.every_steps=10"]
        metrics, quiet = Path(folder, "run/metrics.jsonl"), subprocess.DEVNULL
        for number in range(num_rounds + 1):
            step = last_step(metrics)
            with subprocess.Popen(command, stdout=quiet, stderr=quiet) as job:
                wait_until(lambda step=step: last_step(metrics) > step + 25)
                metrics.unlink()  # what one life wrote would be taken for the next one's
                os.kill(worker_of(job.pid), signal.SIGKILL)
                since = time.perf_counter()
                wait_until(lambda: last_step(metrics) > 0)
                if number:  # the first time it compiles what a resumption needs
                    seconds.append(time.perf_counter() - since)
                job.send_signal(signal.SIGTERM)
    return {"to the next step": statistics.median(seconds), "longest": max(seconds)}


def worker_of(launcher: int) -> int:
    """Process 1 of a launcher."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            parent = path.with_name("stat").read_text().rpartition(")")[2].split()[1]
            if parent == str(launcher) and "JAX_PROCESS_ID=1" in path.read_text().split("\0"):
                return int(path.parent.name)
    raise RuntimeError(f"{launcher} has no worker 1")


PARTS = {"start": start, "death": death, "restart": restart}


if __name__ == "__main__":
    print_figures(PARTS, __doc__.splitlines()[0])
