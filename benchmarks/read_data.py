"""Times each stage that the batches of a config go through, from the order to the devices.

python benchmarks/read_data.py --config my.yaml data.num_workers=4
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jddp.config.cli import Parser, add_config_arguments
from jddp.config.files import load_config
from jddp.data.order import Order
from jddp.distributed.command import run_command
from jddp.trainer.job.build import build
from jddp.trainer.prefetch import Source


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    parser = Parser(prog="python benchmarks/read_data.py")
    add_config_arguments(parser)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each stage (3)")
    arguments = parser.parse_args(argv)
    return run_command(lambda: bench(arguments))


def bench(arguments: argparse.Namespace) -> None:
    """Prints examples a second of each stage."""
    config, name = load_config(arguments.config, arguments.overrides)
    job = build(config)
    print(f"{name}: {job.data.description}" if job.data else name)
    for stage, (step, close) in _stages(job).items():
        num_steps, seconds = _time(step, arguments.seconds)
        close()
        rate = num_steps * config.data.global_batch_size / seconds
        print(f"{stage:34} {rate:12,.0f} examples/s  {1e3 * seconds / num_steps:9.3f} ms a batch")


def _stages(job: Any) -> dict[str, tuple[Callable[[], Any], Callable[[], None]]]:
    """For each stage, what takes one batch through it, and what ends it."""
    config, examples, batches = job.config, job.data.train, job.train_batches()
    size, positions = config.data.global_batch_size, _positions(job)
    order = Order(len(examples), config.seed, config.data.shuffle)
    taken = order.examples_at(np.arange(size))
    source = Source(batches, job.ddp.shard_batch)
    source.start(2**62)

    def nothing() -> None:
        """Nothing to end."""

    def end() -> None:
        source.close()
        if hasattr(batches, "close"):
            batches.close()

    workers = config.data.num_workers
    through = f"on the devices, by {workers} workers" if workers else "on the devices, by a thread"
    return {
        "order": (lambda: order.examples_at(next(positions) + np.arange(size)), nothing),
        "read": (lambda: examples.take(taken), nothing),
        "order, read and transform": (lambda: batches.batch(next(positions)), nothing),
        through: (lambda: next(source), end),
    }


def _positions(job: Any) -> Iterator[int]:
    """Where batches of one epoch begin, again and again."""
    size = job.config.data.global_batch_size
    while True:
        yield from range(0, max(1, len(job.data.train) - size), size)


def _time(step: Callable[[], Any], seconds: float) -> tuple[int, float]:
    """Repeats a step for so long; the first is not counted."""
    step()
    num_steps, since = 0, time.perf_counter()
    while (passed := time.perf_counter() - since) < seconds or not num_steps:
        step()
        num_steps += 1
    return num_steps, passed


if __name__ == "__main__":
    sys.exit(main())
