"""Compares the default job's step in two checkouts: its compile time, its memory, its time.

    git worktree add --detach ../before COMMIT
    python benchmarks/checkouts.py ../before --rounds 9

The two take turns, each turn in a process of its own and without a compilation cache, and the order
turns too. Printed are the median over the rounds of this checkout / the other, and, as noise, the
same of two turns of the other.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUM_STEPS = 20


def turn() -> None:
    """Compiles and runs the step of the jddp on the path, and prints its figures as JSON."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)

    from step_time import cnn_job, loss_fn

    import jddp

    job = cnn_job()
    ddp = jddp.DataParallel(job.model, job.optimizer, loss_fn)
    start = time.perf_counter()
    # An earlier commit has it at another place.
    lower = ddp.lower if hasattr(ddp, "lower") else ddp.steps.lower
    lowered = lower(job.batch)
    after_lower = time.perf_counter()
    size = lowered.compile().memory_analysis()
    after_compile = time.perf_counter()
    state = ddp.init(seed=0, batch=job.batch)
    times = []
    for _ in range(NUM_STEPS):
        before_step = time.perf_counter()
        state, metrics = ddp.step(state, job.batch)
        jax.block_until_ready((state.params, metrics))
        times.append(time.perf_counter() - before_step)
    figures = {
        "trace and lower, s": after_lower - start,
        "compile, s": after_compile - after_lower,
        "step, s": statistics.median(times),
        "temporaries, bytes": size.temp_size_in_bytes,
        "arguments and results, bytes": size.argument_size_in_bytes + size.output_size_in_bytes,
    }
    print(json.dumps(figures))


def measure(checkout: Path) -> dict[str, float]:
    """The figures of one turn of a checkout."""
    # Its own jobs and peers too: they import from their own jddp.
    paths = [checkout, checkout / "benchmarks", checkout / "tests"]
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); "
    program += f"sys.path[:0] = {[str(path) for path in paths]!r}; "
    # By its path: a checkout of before may have no file of this name.
    program += f"import runpy; runpy.run_path({__file__!r})['turn']()"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=environment,
        cwd=checkout,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Runs the rounds, and prints the table."""
    parser = argparse.ArgumentParser(description="Compares the step in two checkouts.")
    parser.add_argument("other", type=Path, help="checkout to compare with")
    parser.add_argument("--rounds", type=int, default=9, help="rounds, of three turns each (9)")
    arguments = parser.parse_args()
    other = arguments.other.resolve()
    rounds = []
    for i in range(arguments.rounds):
        order = [("here", ROOT), ("other", other), ("again", other)]
        rounds.append({name: measure(path) for name, path in order[:: -1 if i % 2 else 1]})
        print(f"round {i + 1} of {arguments.rounds}", file=sys.stderr)
    print(f"{'':30}{'other':>14}{'here / other':>14}{'noise':>8}")
    for key in rounds[0]["other"]:
        of = {name: [turns[name][key] for turns in rounds] for name in rounds[0]}
        ratio, noise = (
            statistics.median(x / y for x, y in zip(of[name], of["other"], strict=True))
            for name in ("here", "again")
        )
        print(f"{key:30}{statistics.median(of['other']):14,.3f}{ratio:14.3f}{noise:8.3f}")


if __name__ == "__main__":
    main()
