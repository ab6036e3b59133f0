"""Compares the modes of a step: their bytes, their memory, their time, their accuracy.

    python benchmarks/modes.py
    python benchmarks/modes.py --only "PowerSGD, rank 2" --rounds 40
    python benchmarks/modes.py --accuracy --seeds 0 1    the default job, for each mode and seed

All modes train the default job (`jddp.train` without arguments) and take turns within each round.

    wire       KiB that a ring moves into and out of each device in a step, of all that the step
               asks for: (N-1)/N of what is gathered, scattered or exchanged, twice that of what is
               reduced; read in the lowered program, since XLA:CPU widens bfloat16
    optimizer  KiB of the optimizer's state on a device
    memory     KiB of the reduction's state on a device: a hook's, or of local SGD
    ratio      median over the rounds of the mode's step / the mean's; of CPUs, whose network is
               memory: what the arithmetic costs, and nothing of what a network would gain
    accuracy   of the default job, as its config is, at its end

"own statistics" is the mean with local batch norms, which the modes below it need.
PowerSGD is measured where it compresses, and trains from the step on that is its default.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
from step_time import Turn, machine, stepping

from jddp.config.files import load_config
from jddp.inspection.hlo import Collective, collectives, read_program
from jddp.trainer.job.build import build

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
EVERY = 16  # steps between two outer steps
OWN = {"ddp.batch_norm": "local"}  # as modes need that do not synchronize in each layer
LOCAL = {"ddp.strategy": "local_steps", "ddp.strategy.every": EVERY}
POWERSGD = {"ddp.reduction.hook.name": "powersgd"}
MODES: dict[str, dict[str, Any]] = {
    "mean": {},
    "bfloat16": {"ddp.reduction": "bfloat16"},
    "float16": {"ddp.reduction": "float16"},
    "PowerSGD, rank 1": {**POWERSGD, "ddp.reduction.hook.kwargs.rank": 1},
    "PowerSGD, rank 2": {**POWERSGD, "ddp.reduction.hook.kwargs.rank": 2},
    "PowerSGD, rank 4": {**POWERSGD, "ddp.reduction.hook.kwargs.rank": 4},
    "signs": {"ddp.reduction.hook.target": "send_signs:send_signs"},
    "split optimizer": {"ddp.strategy": "zero1"},
    "own statistics": OWN,
    "8 shards": {**OWN, "ddp.strategy": "logical_replicas", "ddp.strategy.number": 8},
    "averages": {**OWN, **LOCAL},
    "DiLoCo": {
        **OWN,
        **LOCAL,
        "ddp.strategy.outer.kwargs.learning_rate": 0.7,
        "ddp.strategy.outer.kwargs.momentum": 0.9,
        "ddp.strategy.outer.kwargs.nesterov": True,
    },
}
AT_WORK = {"ddp.reduction.hook.kwargs.start_step": 0}  # of what begins later, when it is measured
MEAN, AGAIN = "mean", "mean again"


def job(name: str) -> Any:
    options = MODES[name]
    at_work = AT_WORK if options.items() >= POWERSGD.items() else {}
    config, _ = load_config([], {**options, **at_work})
    return build(config)


def moved(collective: Collective, num_devices: int) -> float:
    """Bytes that a ring moves into each device, and out of it, in the mean step."""
    runs = 1 / EVERY if "outer_step/" in collective.op_name else collective.num_runs or 1
    share = (num_devices - 1) / num_devices * collective.bytes * runs
    return 2 * share if collective.op == "all-reduce" else share


def bytes_on_a_device(tree: Any) -> int:
    shards = [x.addressable_shards[0].data for x in jax.tree.leaves(tree)]
    return sum(x.size * x.dtype.itemsize for x in shards)


def measure(name: str, num_steps: int) -> tuple[dict[str, float], Turn]:
    """What a mode sends and keeps, and turns of its steps."""
    made = job(name)
    ddp, batch = made.ddp, made.train_batches().batch(0)
    state = ddp.init(0, batch)
    found = collectives(read_program(ddp.steps.lower(batch).as_text("hlo", debug_info=True)))
    row = {
        "wire_kib": sum(moved(x, ddp.mesh.size) for x in found) / 1024,
        "optimizer_kib": bytes_on_a_device(state.opt_state) / 1024,
        "memory_kib": bytes_on_a_device(state.comm_state) / 1024,
    }
    return row, stepping(ddp.step, state, ddp.shard_batch(batch), num_steps)


def ratios(turns: dict[str, Turn], num_rounds: int) -> dict[str, float]:
    """Medians over interleaved rounds of the time of a step / that of the mean."""
    for turn in turns.values():
        turn()  # Compiles.
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    for i in range(num_rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(turns[name]())
    return {
        name: statistics.median(a / b for a, b in zip(found, seconds[MEAN], strict=True))
        for name, found in seconds.items()
    }


def train(name: str, seed: int) -> float:
    """The accuracy with which the default job ends."""
    with tempfile.TemporaryDirectory() as folder:
        options = {**MODES[name], "seed": seed, "run.dir": folder + "/run"}
        arguments = [f"{key}={value}" for key, value in options.items()]
        path = os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH")]))
        subprocess.run(
            [sys.executable, "-m", "jddp.train", *arguments],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [line["accuracy"] for line in map(json.loads, lines) if line["split"] == "eval"][-1]


def print_accuracies(names: list[str], seeds: list[int]) -> None:
    print(f"{'':18} accuracy of seeds {', '.join(map(str, seeds))}; their mean")
    results: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        results[name] = [train(name, seed) for seed in seeds]
        each = "  ".join(f"{x:.4f}" for x in results[name])
        print(f"{name:18} {each}  {statistics.mean(results[name]):.4f}", flush=True)
    print(json.dumps({**machine(), "seeds": seeds, "accuracy": results}))


def print_rows(names: list[str], num_rounds: int, num_steps: int) -> None:
    rows, turns = {}, {}
    for name in dict.fromkeys([MEAN, *names]):
        rows[name], turns[name] = measure(name, num_steps)
    rows[AGAIN], turns[AGAIN] = measure(MEAN, num_steps)
    found = ratios(turns, num_rounds)
    print(f"{'':18} {'wire':>9} {'optimizer':>10} {'memory':>9} {'ratio':>7}")
    for name, row in rows.items():
        row["ratio"] = found[name]
        print(
            f"{name:18} {row['wire_kib']:9,.1f} {row['optimizer_kib']:10,.1f} "
            f"{row['memory_kib']:9,.1f} {row['ratio']:7.3f}"
        )
    print(json.dumps({**machine(), "rounds": num_rounds, "results": rows}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=30, help="30 by default")
    parser.add_argument("--steps", type=int, default=4, help="in a turn; 4 by default")
    parser.add_argument("--accuracy", action="store_true", help="train, and measure nothing else")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES))  # for the hook that a mode names
    if arguments.accuracy:
        print_accuracies(arguments.only, arguments.seeds)
    else:
        print_rows(arguments.only, arguments.rounds, arguments.steps)


if __name__ == "__main__":
    main()
