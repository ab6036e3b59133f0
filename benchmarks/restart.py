"""Times the phases between the `kill -9` of one of two processes and the next step of the job.

    JAX_PLATFORMS=cpu python benchmarks/restart.py --rounds 100
    JAX_PLATFORMS=cpu python benchmarks/restart.py --rounds 9 --process 0
    JAX_PLATFORMS=cpu python benchmarks/restart.py --rounds 30 --every 60
    JAX_PLATFORMS=cpu python benchmarks/restart.py --rounds 20 --hosts 2     # as root, on Linux

The default job runs on two processes under one `jddp launch`, or under one on each of two hosts,
which are network namespaces with memory of their own. In each round a process is killed at a random
moment, when it has taken a step; with `--every` so many seconds after the last one. A phase ends
when the (first) launcher prints the line that ends it:

    detect      the launcher names the process that was killed
    stop        the other process has ended, and both are started again
    start       imports, join, data: process 0 prints the description of the job
    restore     the first state, and the checkpoint: "resumed from step"
    first step  the step is loaded from the cache of compiled programs, and taken

In round 0, which is not counted, it compiles what a resumption needs. Figures are seconds; the
last line is JSON. "goodput" is the share of the time between the first and the last kill in steps
that were kept, from resumption to resumption, if each had taken the median time of a step; "kept"
is their share by the time that each took, without the first one after a resumption.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / x) for x in ("tests", "tests/e2e")]
from clusters.hosts import Hosts  # noqa: E402
from runs import worker_of  # noqa: E402

LAUNCH = [sys.executable, "-m", "jddp.launch"]
JOB = ["-m", "jddp.train", "train.log_every_steps=1", "checkpoint.every_steps=500"]
# The lines that end the phases, in this order.
PHASES = {
    "detect": r"failed first, with signal SIGKILL",
    "stop": r"starting process 0.* of 2",
    "start": r"^\[0\] jddp \S+ \|",
    "restore": r"^\[0\] resumed from step",
    "first step": r"^\[0\] step \d+/",
}
STEP = PHASES["first step"]
PAUSE_SECONDS = 8.0, 14.0  # From a first step to the next kill: processes that wait are ready.


def wait_for(lines: Iterator[str], pattern: str, seen: list[str]) -> float:
    """The time at which a line with this pattern is printed."""
    for line in lines:
        seen.append(line)
        if re.search(pattern, line):
            return time.perf_counter()
    raise RuntimeError(f"the job has ended before {pattern!r}:\n{''.join(seen[-30:])}")


def kill_one(logs: str, lines: Iterator[str], number: int, at: float | None) -> dict[str, float]:
    """Kills a process at a time, or a random moment after a step; the seconds of each phase.

    Args:
      logs: Folder in which the launcher of the process has its logs.
      lines: Lines of the first launcher.
      number: Number of the process in the job.
      at: Time; None for a random one.
    """
    seen: list[str] = []
    wait_for(lines, STEP, seen)
    at = at or time.perf_counter() + random.uniform(*PAUSE_SECONDS)
    time.sleep(at - time.perf_counter())
    began = last = time.perf_counter()
    os.kill(worker_of(logs, number), signal.SIGKILL)
    seconds = {}
    for phase, pattern in PHASES.items():
        now = wait_for(lines, pattern, seen)
        seconds[phase] = now - last
        last = now
    resumed = next(filter(None, (re.search(r"resumed from step (\d+)", line) for line in seen)))
    return {**seconds, "all": last - began, "killed at": began, "step": int(resumed[1])}


@contextlib.contextmanager
def launchers(
    num_hosts: int, folder: str, options: list[str], job: list[str]
) -> Iterator[list[subprocess.Popen[str]]]:
    """While open, the job runs; yields its launcher, or the launchers of both hosts."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with contextlib.ExitStack() as stack:
        if num_hosts == 1:
            own = ["--num-processes", "2", "--logs", f"{folder}/logs-0"]
            command = [*LAUNCH, *own, *options, *job]
            yield [_ended_with(stack, subprocess.Popen(command, **pipes))]
            return
        hosts = stack.enter_context(Hosts(Path(folder), "h1", "h2"))
        nodes = ["--num-processes", "1", "--num-nodes", "2", "--coordinator", "h1:61500"]
        started = []
        for rank, name in enumerate(hosts.addresses):
            memory = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
            own = [*nodes, "--node-rank", str(rank), "--logs", f"{folder}/logs-{rank}"]
            environ = {**os.environ, "JDDP_MEMORY_DIR": memory}
            command = [*LAUNCH, *own, *options, *job]
            started.append(_ended_with(stack, hosts.start(name, *command, env=environ, **pipes)))
            pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        yield started


def _ended_with(
    stack: contextlib.ExitStack, launcher: subprocess.Popen[str]
) -> subprocess.Popen[str]:
    """Ends a launcher with the stack, also where a round has failed."""
    stack.enter_context(launcher)
    stack.callback(launcher.terminate)
    return launcher


def measure(
    num_rounds: int, process: int | None, every: float | None, num_hosts: int
) -> list[dict[str, float]]:
    """The seconds of each phase in each round; the last round has the goodput, too."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = ["--max-restarts", str(num_rounds + 1)]
        job = [*JOB, f"run.dir={folder}/run", "train.num_epochs=10000"]
        with launchers(num_hosts, folder, options, job) as started:
            lines = iter(started[0].stdout)
            chosen = (0, 1) if process is None else (process,)
            rounds, first = [], 0.0
            for number in range(num_rounds + 1):
                at = first + number * every if every and number else None
                killed = random.choice(chosen)
                logs = f"{folder}/logs-{min(killed, num_hosts - 1)}"
                rounds.append(kill_one(logs, lines, killed, at))
                first = rounds[0]["killed at"]
            started[0].send_signal(signal.SIGTERM)
            for _ in lines:  # Until it has saved.
                pass
        text = Path(folder, "run", "metrics.jsonl").read_text()
    records = map(json.loads, text.splitlines())
    seconds = {x["step"]: x["step_seconds"] for x in records if "step_seconds" in x}
    begin, end = rounds[0]["step"], rounds[-1]["step"]
    wall = rounds[-1]["killed at"] - rounds[0]["killed at"]
    rounds[-1]["goodput"] = (end - begin) * statistics.median(seconds.values()) / wall
    rounds[-1]["kept"] = sum(x for step, x in seconds.items() if begin < step <= end) / wall
    return rounds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--process", type=int, choices=(0, 1), help="kill this one (either)")
    parser.add_argument("--every", type=float, help="seconds from a kill to the next (8 to 14)")
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1)
    arguments = parser.parse_args()
    rounds = measure(arguments.rounds, arguments.process, arguments.every, arguments.hosts)
    figures = {}
    print(f"{'phase':12}{'median':>8}{'longest':>9}{'share':>8}")
    whole = statistics.median(x["all"] for x in rounds)
    for phase in (*PHASES, "all"):
        values = [x[phase] for x in rounds]
        median, longest = statistics.median(values), max(values)
        print(f"{phase:12}{median:8.2f}{longest:9.2f}{median / whole:8.0%}")
        figures[phase] = {"median": round(median, 3), "longest": round(longest, 3)}
    shares = {name: round(rounds[-1][name], 3) for name in ("goodput", "kept")}
    print(json.dumps({"rounds": len(rounds), **shares, **figures}))


if __name__ == "__main__":
    main()
