"""Trains ResNet-50, ViT-B/16 and GPT-2 124M on GPUs: jddp, a step by hand, and PyTorch.

    python3 benchmarks/gpu.py --out gpu.json
    python3 benchmarks/gpu.py --only gpt2_124m --rounds 15
    "$(scripts/venv aot)" benchmarks/gpu.py --compile-only     # without a GPU
    python3 benchmarks/gpu.py --smoke                          # tiny, on the CPU: does it run?

It ends within --budget-seconds (520), and needs no network, and of jddp only this checkout.

    by_hand          a jitted step with Flax and optax for one device
    jddp             jddp.DataParallel, with batch norm of each replica, as PyTorch has it
    jddp_sync        the same with synchronized batch norm, jddp's default; ResNet-50 alone has any
    jddp_cudnn       the same with attention by cuDNN, as PyTorch has it
    jddp_of_8        jddp, compiled for eight GPUs of which seven and the network are mocked: what
                     being one of many costs beside the network. It computes nonsense
    jddp_sync_of_8   the same with synchronized batch norm
    torch            DistributedDataParallel, eager
    torch_compiled   the same through torch.compile

Where there are several GPUs, jddp uses all in one process and PyTorch has a process for each; the
step by hand, and one of eight, use the first. Rates are those of one GPU.

All train on the same rows with arithmetic in bfloat16, the JAX ones also the same network object.
Each has a process of its own; they build one at a time, since kernels are chosen by timing them,
and then take turns of --turn-seconds, in another order each round. A step's time is the median over
the rounds, ratios are medians of ratios within a round. Compiling, choosing kernels and warming up
come before. A contender that fails is shown with the reason, and the others continue. Peak memory
is the most that the framework's allocator gave out; JAX's includes choosing kernels, PyTorch's does
not. The loss is that after warming up; the JAX contenders start from the same values, and a row is
marked where its loss is not that by hand: by 1 %; on several GPUs, with their rows, and for
PyTorch, which starts from other values, by 10 %.
MFU is over the dense peak of the device in bfloat16 (jddp/inspection/flops.py); gpu_jobs.py counts
operations. The last table compares the values with those that gpu_predictions.toml has predicted.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_crew import ROOT, Contender, Facts, Failure
from gpu_jobs import JOBS, SMOKE_JOBS, Job, runs
from gpu_score import compare, table

from jddp.inspection.flops import seconds_at_peak

# In the order in which they build, as far as they are ready to.
SCRIPTS = {
    "by_hand": "gpu_jax.py",
    "jddp": "gpu_jax.py",
    "torch_compiled": "gpu_torch.py",
    "jddp_cudnn": "gpu_jax.py",
    "torch": "gpu_torch.py",
    "jddp_sync": "gpu_jax.py",
    "jddp_of_8": "gpu_jax.py",
    "jddp_sync_of_8": "gpu_jax.py",
}
COMPARED = {"by_hand": "/ by hand", "torch_compiled": "/ torch comp."}
NUM_DEVICES = 8
MOST_OF_WHAT_IS_LEFT = 0.6
GRACE_SECONDS = 15  # for a turn that began in time
# Allowed differences of losses from that by hand: from the same values and rows, and from others.
SAME_START, OTHER_START = 0.01, 0.1
COLUMNS = f"{'':10} {'':14} {'a second':>16} {'step':>9} {'spread':>6} {'MFU':>6} {'peak':>9}" + (
    "".join(f" {title:>13}" for title in COMPARED.values()) + f" {'loss':>7}"
)


def environment(name: str, *, smoke: int, cache: str) -> dict[str, str]:
    """The environment of a contender's process; `smoke` virtual devices, or 0 for GPUs."""
    is_one_of_8 = name.endswith("_of_8")
    environ = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if smoke:
        environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environ |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        return environ | {"JAX_NUM_CPU_DEVICES": str(NUM_DEVICES if is_one_of_8 else smoke)}
    # Later contenders use the kernels that the first has chosen: the same choice for all.
    environ |= {"JAX_PLATFORMS": "cuda", "JAX_COMPILATION_CACHE_DIR": cache}
    if is_one_of_8:
        # Mocked processes choose no kernels, and a real one would wait for theirs.
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_shard_autotuning=false"
        first, _, _ = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")
        environ |= {"XLA_FLAGS": flags.strip(), "CUDA_VISIBLE_DEVICES": first}
        environ |= {"JAX_MOCK_GPU_TOPOLOGY": f"1x{NUM_DEVICES}x1"}
    return environ


class Race:
    """The contenders of one job."""

    def __init__(
        self, name: str, job: Job, contenders: list[str], measured: "Measured", *, smoke: int
    ) -> None:
        self._name, self._job, self._measured = name, job, measured
        self._cache = tempfile.mkdtemp(prefix="gpu-benchmark-")
        names = [each for each in SCRIPTS if each in contenders and runs(each, job)]
        self._running = {
            each: Contender(
                [SCRIPTS[each], name, each, *(["smoke"] if smoke else [])],
                environment(each, smoke=smoke, cache=self._cache),
            )
            for each in names
            if not (smoke and each == "jddp_cudnn")
        }

    def build(self, build_by: float) -> None:
        """Builds one after the other, those that are ready first."""
        waiting = list(self._running)
        while waiting:
            ready = [name for name in waiting if self._running[name].has_answered()]
            if not ready and time.monotonic() < build_by:
                time.sleep(0.05)
                continue
            name = (ready or waiting)[0]
            waiting.remove(name)
            # A contender that hangs must leave time to the others.
            share = MOST_OF_WHAT_IS_LEFT if waiting else 1
            deadline = time.monotonic() + share * (build_by - time.monotonic())
            self._try(name, "build", deadline, first=True)

    def take_turns(self, *, num_rounds: int, turn_seconds: float, end_by: float) -> None:
        """Lets those that are built take turns, until all rounds or the time are over."""
        facts, round_seconds = self._measured.rows(self._name), 0.0
        for i in range(num_rounds):
            started, order = time.monotonic(), list(self._running)
            if not order or started + 1.5 * round_seconds > end_by:
                break
            for name in order[i % len(order) :] + order[: i % len(order)]:
                num_steps = max(1, round(turn_seconds / facts[name]["step_seconds"]))
                self._try(name, num_steps, end_by + GRACE_SECONDS)
            round_seconds = time.monotonic() - started

    def print_rows(self) -> None:
        """Prints what came out."""
        facts = self._measured.rows(self._name)
        for name in (name for name in SCRIPTS if name in facts):
            print(format_row(self._name, self._job, name, facts), flush=True)
        self._measured.save()

    def _try(self, name: str, request: Any, deadline: float, *, first: bool = False) -> None:
        contender = self._running[name]
        try:
            if first:  # It is ready.
                contender.answer(deadline)
            answer = contender.ask(request, deadline)
        except Failure as failure:
            del self._running[name]
            answer = {"failure": str(failure)}
        self._measured.note(self._name, name, answer)

    def close(self) -> None:
        """Ends those that are still there."""
        for contender in self._running.values():
            contender.close()
        shutil.rmtree(self._cache, ignore_errors=True)


class Measured:
    """All that is known so far, which is written to a file whenever there is more."""

    def __init__(self, jobs: dict[str, Job], out: Path | None) -> None:
        self._out = out
        self.all: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": shlex.join(["python3", *sys.argv]),
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
            "driver": nvidia_driver(),
            "device": None,
            "versions": {},
            "target_description": None,
            "results": {
                name: {
                    "rows": job.rows,
                    "unit": job.unit,
                    "units_per_row": job.units_per_row,
                    "flops_per_row": job.flops_per_row(),
                    "contenders": {},
                }
                for name, job in jobs.items()
            },
        }

    def rows(self, job: str) -> dict[str, Facts]:
        """What is known of each contender of a job."""
        return self.all["results"][job]["contenders"]

    def note(self, job: str, contender: str, facts: Facts) -> None:
        """Adds what a contender has answered, "seconds" being a turn's, of one step."""
        row, facts = self.rows(job).setdefault(contender, {"turns": []}), rounded(facts)
        if "seconds" in facts:
            row["turns"].append(facts.pop("seconds"))
        self.all["versions"] |= facts.pop("versions", {})
        self.all["device"] = facts.get("device") or self.all["device"]
        self.all["target_description"] = (
            facts.pop("target_description", None) or self.all["target_description"]
        )
        row |= facts
        self.save()

    def save(self) -> None:
        """Writes the file again, if there is one."""
        if self._out:
            partial = self._out.with_name(self._out.name + ".partial")
            partial.write_text(json.dumps(self.all, indent=1) + "\n")
            partial.replace(self._out)


def nvidia_driver() -> str | None:
    """The driver and what the GPU was doing before; None where there is none."""
    wanted = "driver_version,memory.used,clocks.sm,temperature.gpu"
    try:
        command = ["nvidia-smi", f"--query-gpu={wanted}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None


def format_row(name: str, job: Job, contender: str, facts: dict[str, Facts]) -> str:
    """One line of the table; adds to `facts` what it shows."""
    row = facts[contender]
    times, label = row["turns"], f"{name:10} {contender:14}"
    if "failure" in row or not times:
        return f"{label} {row.get('failure', 'out of time: it had no turn')}"
    seconds = statistics.median(times)
    flops = job.flops_per_row() * job.rows / seconds
    at_peak = seconds_at_peak({"bfloat16": flops}, row["device"])
    measured = {
        "median_seconds": seconds,
        "spread": (max(times) - min(times)) / seconds,
        "per_second": job.rows * job.units_per_row / seconds,
        "mfu": at_peak,
        **{f"speed_over_{other}": speed_over(facts.get(other), row) for other in COMPARED},
    }
    row |= rounded(measured)
    shown = [row[f"speed_over_{other}"] for other in COMPARED]
    return (
        f"{label} {row['per_second']:9,.0f} {job.unit} {seconds * 1e3:6.2f} ms "
        f"{row['spread']:6.1%} {'n/a' if row['mfu'] is None else format(row['mfu'], '.1%'):>6} "
        + (f"{row['peak_bytes'] / 2**30:5.1f} GiB" if row["peak_bytes"] else f"{'n/a':>9}")
        + "".join(f" {'n/a' if x is None else format(x, '.3f'):>13}" for x in shown)
        + f" {float(row['early_loss']):7.3f}{verdict(contender, row, facts.get('by_hand'))}"
    )


def verdict(contender: str, row: Facts, by_hand: Facts | None) -> str:
    """The end of a row whose loss is not that by hand; one of eight computes nonsense."""
    if by_hand is None or "early_loss" not in by_hand or contender.endswith("_of_8"):
        return ""
    has_its_rows = row["devices"] == by_hand["devices"] and not contender.startswith("torch")
    difference = float(row["early_loss"]) / float(by_hand["early_loss"]) - 1
    if abs(difference) <= (SAME_START if has_its_rows else OTHER_START):  # False for NaN
        return ""
    return f"  LOSS DIFFERS by {difference:+.1%}"


def rounded(facts: Facts) -> Facts:
    """The same to six digits, which is more than there is in them."""
    return {k: float(f"{x:.6g}") if isinstance(x, float) else x for k, x in facts.items()}


def speed_over(other: Facts | None, row: Facts) -> float | None:
    """How many times as fast as another: the median over the rounds that both were in."""
    if other is None or "failure" in other:
        return None
    both = zip(other["turns"], row["turns"], strict=False)  # The clock may have ended a round.
    ratios = [theirs / ours for theirs, ours in both]
    return statistics.median(ratios) if ratios else None


def race(arguments: argparse.Namespace) -> None:
    started = time.monotonic()
    end_by = started + arguments.budget_seconds
    jobs = {name: (SMOKE_JOBS if arguments.smoke else JOBS)[name] for name in arguments.only}
    measured = Measured(jobs, arguments.out)
    print(COLUMNS, flush=True)
    for i, (name, job) in enumerate(jobs.items()):
        share = (end_by - time.monotonic()) / (len(jobs) - i)
        contest = Race(name, job, arguments.contenders, measured, smoke=arguments.smoke)
        now = time.monotonic()
        try:
            contest.build(now + 0.8 * share)
            contest.take_turns(
                num_rounds=arguments.rounds,
                turn_seconds=arguments.turn_seconds,
                end_by=now + share,
            )
            contest.print_rows()
        finally:
            contest.close()
    print(table(compare(measured.all)))
    print(json.dumps(measured.all))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--contenders", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--rounds", type=int, default=9, help="9 by default")
    parser.add_argument("--turn-seconds", type=float, default=0.5, help="0.5 by default")
    parser.add_argument("--budget-seconds", type=float, default=520, help="520 by default")
    parser.add_argument("--out", type=Path, help="a file for the JSON, written at every step")
    parser.add_argument(
        "--smoke",
        type=int,
        nargs="?",
        const=1,
        default=0,
        metavar="NUM",
        help="tiny networks, on NUM virtual devices of the CPU, 1 by default",
    )
    parser.add_argument("--compile-only", action="store_true", help="compile, without a GPU")
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="with --compile-only: other arguments of the models, such as remat=attention",
    )
    parser.add_argument(
        "--target",
        default="h100_sxm",
        help="a key of modelled.gpus.GPUS, or a file that --out made",
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Through what ends the contenders.
    if arguments.compile_only:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        sys.path.insert(0, str(ROOT))
        from gpu_compile import compile_all

        sizes = dict(text.split("=") for text in arguments.sizes)
        compile_all(arguments.only, arguments.target, sizes)
    else:
        race(arguments)


if __name__ == "__main__":
    main()
