"""Compares reducers: layouts and bucket sizes of jddp, and PyTorch's DistributedDataParallel.

    python benchmarks/reduce.py
    python benchmarks/reduce.py --only torch --jobs mlp --rounds 40

Every contender lives in processes of its own (`crew`) and is given turns, in an order that turns
from round to round; only one runs at a time. A ratio is the median over the rounds of candidate /
reference; `noise` is the same for a second copy of the reference.

    wire      bytes and all-reduces of the step, against parameters x wire dtype, and buckets + 2
    layouts   layout="auto" against the best of the layouts and bucket sizes tried
    torch     jddp against PyTorch, the same network, global batch and optimizer (needs jddp[peers])
    memory    peak memory of a step, against the same step by hand
"""

import argparse
import itertools
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from crew import Crew, jddp_crew, torch_crew
from jobs import JOBS

import jddp

HUGE = "torch DDP with huge pages,"
Contender = tuple[Crew, dict[str, object]]
SIZES = [
    {"reduction": jddp.Reduction(layout="leaf")},
    *({"reduction": jddp.Reduction(bucket_mb=mb, layout="flat")} for mb in (1, 4, 25)),
]


def race(contenders: Mapping[str, Contender], *, num_steps: int, rounds: int) -> dict[str, list]:
    """Seconds per step of every contender, one number a round."""
    seconds: dict[str, list] = {name: [] for name in contenders}
    for turn in range(rounds):
        names = list(contenders)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            crew, contender = contenders[name]
            seconds[name].append(crew.turn(contender, num_steps))
    return seconds


def ratio(seconds: Mapping[str, list], candidate: str, reference: str) -> float:
    pairs = zip(seconds[candidate], seconds[reference], strict=True)
    return statistics.median(a / b for a, b in pairs)


def fastest(seconds: Mapping[str, list], who: str) -> str:
    names = [name for name in seconds if name.startswith(who)]
    return min(names, key=lambda name: statistics.median(seconds[name]))


def print_times(seconds: Mapping[str, list]) -> None:
    for name, found in seconds.items():
        print(f"  {name:<44} {1e3 * statistics.median(found):8.1f} ms")


def print_goal(what: str, value: float, goal: float) -> None:
    print(f"  {what:<44} {value:8.3f}    goal <= {goal:g}")


def compare_layouts(jobs: list[str], rounds: int) -> None:
    tried = {"auto": {}, "auto, again": {}}
    tried |= {" ".join(map(str, size.values())): size for size in SIZES}
    for (processes, devices), job in itertools.product([(1, 2), (1, 8), (2, 2)], jobs):
        print(f"layouts: {job}, {processes} process(es) x {devices // processes} devices")
        # Processes of its own for each: what one leaves in the heap slows the next.
        contenders = {
            name: (jddp_crew(processes, devices), {"job": job, **size})
            for name, size in tried.items()
        }
        seconds = race(contenders, num_steps=JOBS[job].num_steps, rounds=rounds)
        for crew, _ in contenders.values():
            crew.close()
        print_times(seconds)
        noise = seconds.pop("auto, again")
        print_goal("auto / best", ratio(seconds, "auto", fastest(seconds, "")), 1.05)
        print_goal("noise", ratio({**seconds, "again": noise}, "again", "auto"), 1.05)


def torch_contenders(job: str) -> Iterator[tuple[str, Contender]]:
    ddp = torch_crew(2, 1)
    for cap in (1, 25):
        yield f"torch DDP, 2 processes, cap {cap}", (ddp, {"job": job, "bucket_cap_mb": cap})
    yield "torch DDP, again", (ddp, {"job": job, "bucket_cap_mb": 25, "copy": 1})
    huge = torch_crew(2, 1, has_huge_pages=True)
    for cap in (1, 25):
        yield f"{HUGE} 2 processes, cap {cap}", (huge, {"job": job, "bucket_cap_mb": cap})
    for threads in (1, 2):
        yield f"torch, 1 process x {threads} threads", (torch_crew(1, threads), {"job": job})
    yield "jddp, 2 processes", (jddp_crew(2, 2), {"job": job})
    one = jddp_crew(1, 2)
    yield "jddp, 1 process x 2 devices", (one, {"job": job})
    yield "jddp, mesh=1", (one, {"job": job, "mesh": 1})
    if job == "gpt_words":
        yield "jddp, loss in tiles, 2 processes", (jddp_crew(2, 2), {"job": job, "tiles": True})
        yield "jddp, loss in tiles, 2 devices", (jddp_crew(1, 2), {"job": job, "tiles": True})


def compare_with_torch(jobs: list[str], rounds: int) -> None:
    goals = {"mlp": (1.0, 0.65, 0.9), "gpt": (1.1, 0.9, None), "gpt_words": (1.1, 0.9, None)}
    for job in jobs:
        if job not in goals:
            continue
        print(f"torch: {job}, global batch {JOBS[job].rows}")
        contenders = dict(torch_contenders(job))
        seconds = race(contenders, num_steps=JOBS[job].num_steps, rounds=rounds)
        for crew in {id(crew): crew for crew, _ in contenders.values()}.values():
            crew.close()
        print_times(seconds)
        ddp, huge = fastest(seconds, "torch DDP, 2"), fastest(seconds, HUGE)
        a, b, c = goals[job]
        print_goal("(a) jddp, 2 processes / DDP", ratio(seconds, "jddp, 2 processes", ddp), a)
        print_goal("(b) 2 devices / DDP", ratio(seconds, "jddp, 1 process x 2 devices", ddp), b)
        print_goal("both with huge pages: (a)", ratio(seconds, "jddp, 2 processes", huge), 1.05)
        print_goal(
            "both with huge pages: (b)", ratio(seconds, "jddp, 1 process x 2 devices", huge), 1.05
        )
        if c:
            best = ratio(seconds, fastest(seconds, "jddp"), fastest(seconds, "torch"))
            print_goal("(c) best jddp / best torch", best, c)
        if job == "gpt_words":
            tiled, whole = "jddp, loss in tiles, 2 devices", "jddp, 1 process x 2 devices"
            print_goal("loss in tiles / all logits", ratio(seconds, tiled, whole), 1.0)
        noise = ratio(seconds, "torch DDP, again", "torch DDP, 2 processes, cap 25")
        print_goal("noise", noise, 1.05)


def run_alone(script: str) -> Callable[[list[str], int], None]:
    """A section in a process of its own, since it needs eight devices."""

    def section(jobs: list[str], rounds: int) -> None:
        del rounds
        command = [sys.executable, Path(__file__).with_name(script), *jobs]
        subprocess.run(command, check=True)

    return section


SECTIONS = {
    "wire": run_alone("wire.py"),
    "memory": run_alone("memory.py"),
    "layouts": compare_layouts,
    "torch": compare_with_torch,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    for name in arguments.only:
        SECTIONS[name](arguments.jobs, arguments.rounds)


if __name__ == "__main__":
    main()
