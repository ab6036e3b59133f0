"""Times what a launcher adds: before the first line, and between a death and the resumption.

    JAX_PLATFORMS=cpu python benchmarks/launch.py
    JAX_PLATFORMS=cpu python benchmarks/launch.py --only start --rounds 9
    JAX_PLATFORMS=cpu python benchmarks/launch.py --only ray --rounds 10

    start     seconds from the start of a launcher of four processes to the first line of the last
              of them, less what the same program takes by itself: `jddp.launch`, and torchrun
              where PyTorch is installed
    death     seconds from the `kill -9` of one of two processes, which know nothing of JAX, to the
              line that names it, and to the end of the launcher
    ray       seconds from the `kill -9` of one of two processes of the default job under Ray to
              its next finished step, on a cluster of this machine, where Ray is installed; and,
              for a job of Ray Train alone that does nothing, from the `kill -9` of a worker to
              the start of both workers again. `restart.py` does without Ray

Contenders take turns; a figure is the median over the rounds. The last line is JSON.
"""

import importlib.util
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from overhead import last_step, print_figures, wait_until
from restart import PAUSE_SECONDS, worker_of

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


def restart(num_rounds: int, *options: str) -> dict[str, float]:
    seconds = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [*LAUNCH, "--num-processes", "2", "--max-restarts", str(num_rounds + 1), *options]
        command += ["--logs", f"{folder}/logs", "-m", "jddp.train", f"run.dir={folder}/run"]
        command += ["train.log_every_steps=1", "train.num_epochs=10000"]
        metrics, quiet = Path(folder, "run/metrics.jsonl"), subprocess.DEVNULL
        with subprocess.Popen(command, stdout=quiet, stderr=quiet) as job:
            wait_until(lambda: last_step(metrics) > 25)
            for number in range(num_rounds + 1):
                time.sleep(random.uniform(*PAUSE_SECONDS))
                os.kill(worker_of(f"{folder}/logs", number % 2), signal.SIGKILL)
                since = time.perf_counter()
                time.sleep(0.5)  # Until the step under way, which was its last, is written.
                metrics.unlink()  # What one life wrote would be taken for the next one's.
                wait_until(lambda: last_step(metrics) > 0)
                if number:  # The first time it compiles what a resumption needs.
                    seconds.append(time.perf_counter() - since)
            job.send_signal(signal.SIGTERM)
    return {"to the next step": statistics.median(seconds), "longest": max(seconds)}


def ray(num_rounds: int) -> dict[str, float]:
    seconds, scripts = [], [sys.executable, "-m", "ray.scripts.scripts"]
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
    head = ["--head", "--port=6399", "--num-cpus=2", "--include-dashboard=false", "--block"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*scripts, "start", *head], **quiet) as cluster:
        try:
            status = [*scripts, "status", "--address=127.0.0.1:6399"]
            wait_until(lambda: subprocess.run(status, check=False, **quiet).returncode == 0)
            for _ in range(num_rounds):
                seconds.append(nothing(quiet))
            found = restart(num_rounds, "--ray", "127.0.0.1:6399", "--devices-per-process", "1")
        finally:
            cluster.terminate()
    return found | {
        "a job that does nothing, to its start": statistics.median(seconds),
        "its longest": max(seconds),
    }


NOTHING = """
import os, sys, time
import ray.train
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer

def work(folder):
    rank = ray.train.get_context().get_world_rank()
    open(f"{folder}/pid-{rank}-{os.getpid()}", "w").close()
    time.sleep(600)

ray.init("127.0.0.1:6399")
size = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})
kept = RunConfig(storage_path=sys.argv[1], failure_config=FailureConfig(max_failures=1))
about = {"jax_config": JaxConfig(), "scaling_config": size, "run_config": kept}
JaxTrainer(work, train_loop_config=sys.argv[1], **about).fit()
"""


def nothing(quiet: dict[str, Any]) -> float:
    """Seconds from the death of a worker of Ray Train until both have been started again."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-c", NOTHING, folder]
        with subprocess.Popen(command, **quiet) as job:
            wait_until(lambda: len([*Path(folder).glob("pid-*")]) == 2)
            (first,) = Path(folder).glob("pid-1-*")
            since = time.perf_counter()
            os.kill(int(first.name.split("-")[2]), signal.SIGKILL)
            wait_until(lambda: len([*Path(folder).glob("pid-*")]) == 4)
            seconds = time.perf_counter() - since
            job.terminate()
    return seconds


PARTS: dict[str, Any] = {"start": start, "death": death}
if importlib.util.find_spec("ray") is not None:
    PARTS["ray"] = ray


if __name__ == "__main__":
    print_figures(PARTS, __doc__.splitlines()[0])
