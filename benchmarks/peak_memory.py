"""Compares the memory that `jddp.memory` reports with the most that a process holds.

    python benchmarks/peak_memory.py
    python benchmarks/peak_memory.py --only fsdp

A process for each row makes the first state of a GPT of 35 million parameters with AdamW, on four
virtual CPU devices, and takes three steps of four rows of 128 tokens on each device. The resident
set is read every two milliseconds, less that of the process before, with all programs compiled.
Compared is the larger of start and step.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 4)

import numpy as np  # noqa: E402  # The number of devices comes first.
import optax  # noqa: E402
from step_time import machine  # noqa: E402

import jddp  # noqa: E402
from jddp.zoo.losses import next_token  # noqa: E402
from jddp.zoo.models import GPT  # noqa: E402

STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "zero1": "zero1",
    "fsdp": "fsdp",
    "fsdp in groups of 2": jddp.FSDP(group_size=2),
    "local steps": jddp.LocalSteps(2),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "4 micro-batches": {"accumulate_steps": 4},
    "bfloat16": {"precision": "bfloat16"},
    "4 micro-batches, bfloat16": {"accumulate_steps": 4, "precision": "bfloat16"},
}
WITH_ALL_OPTIONS = ("ddp", "zero1", "fsdp")
CASES = {
    ", ".join(filter(None, (strategy, option))): {"strategy": STRATEGIES[strategy]} | options
    for strategy in STRATEGIES
    for option, options in OPTIONS.items()
    if strategy in WITH_ALL_OPTIONS or not option
}
GOAL = 0.1
MIB = 2**20


class Resident:
    """The resident set of this process in bytes, beyond that at the beginning."""

    def __init__(self) -> None:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # What compilers have freed would be used again.
        self._before = self._now()
        self.peak = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _now(self) -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, self._now() - self._before)
            time.sleep(0.002)

    def forget(self) -> int:
        """Returns the peak until now, and begins another."""
        time.sleep(0.1)
        peak, self.peak = self.peak, 0
        return peak


def measure(options: dict[str, Any]) -> dict[str, float]:
    """The memory of all devices in MiB, as reported and as taken."""
    model = GPT(vocab_size=8192, num_layers=4, num_heads=12, width=768, max_length=128)
    ddp = jddp.DataParallel(model, optax.adamw(1e-3), next_token, **options)
    batch = {"tokens": np.zeros((16, 129), np.int32)}
    memory, num = jddp.memory(ddp, batch), len(jax.devices())
    resident = Resident()
    state = jax.block_until_ready(ddp.init(0, batch))
    start = resident.forget()
    for _ in range(3):
        state, metrics = ddp.step(state, batch)
        float(metrics["loss"])
    reported = {"start": memory.start * num, "step": memory.total * num}
    taken = {"start taken": start, "step taken": resident.forget()}
    return {name: x / MIB for name, x in (reported | taken).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=CASES, metavar="CASE", help="names of rows")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(CASES[arguments.measure])))
        return
    head = ("start", "taken", "step", "taken", "peak / taken")
    print(f"{'MiB of all devices':<34}" + "".join(f"{x:>14}" for x in head))
    found = {}
    for name in arguments.only:
        command = [sys.executable, __file__, "--measure", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        row = found[name] = json.loads(done.stdout.splitlines()[-1])
        numbers = [row[x] for x in ("start", "start taken", "step", "step taken")]
        ratio = max(row["start"], row["step"]) / max(row["start taken"], row["step taken"])
        row["ratio"] = ratio
        told = "".join(f"{x:>14,.0f}" for x in numbers)
        missed = "" if abs(ratio - 1) <= GOAL else "  more than 10 % off"
        print(f"{name:<34}{told}{ratio:>14.3f}{missed}", flush=True)
    print(json.dumps({"results": found, **machine()}))


if __name__ == "__main__":
    main()
