"""Whether the data keep up with the step, in examples a second of a process.

    print(measure_data_rate(job))
    # a thread reads 410 images/s, a step takes 2,800: data.num_workers=9

A process reads its own rows by one thread, as in training; the step is timed on rows of ones.
"""

import itertools
import math
import os
import time
from dataclasses import dataclass

import jax
import numpy as np

from jddp.engine.mesh import platform
from jddp.ground.errors import UsageError
from jddp.inspection.flops import count_flops
from jddp.inspection.memory import memory
from jddp.modules.rows import count_rows
from jddp.trainer.job.job import Job

SECONDS = 2.0  # of reading
# Time of a worker for a batch over the time of a thread: the batch goes through shared memory.
SENDING = 1.25  # 2.7 to 3.0 ms of its processor for an image, and 2.4 ms: benchmarks/data.py
NUM_STEPS = 4  # that are timed at once
MOST_FLOPS = 2e10  # of a step that is timed on CPUs, which takes a second or two


@dataclass(frozen=True)
class DataRate:
    """Examples a second of one process.

    Attributes:
      noun: The examples in words, "images" if there are images.
      read: Examples a second that one thread reads.
      needed: Examples a second that the step takes; None if it was not timed.
      num_cores: Number of processors that this process may use.
    """

    noun: str
    read: float
    needed: float | None
    num_cores: int

    @property
    def num_workers(self) -> int:
        """Number of processes that are to read, 0 if a thread suffices or the need is unknown."""
        if self.needed is None or self.needed <= self.read:
            return 0
        return math.ceil(SENDING * self.needed / self.read)

    def __str__(self) -> str:
        """One sentence."""
        reads = f"a thread reads {self.read:,.0f} {self.noun}/s"
        if self.needed is None:
            return f"{reads}; the step was not timed"
        both = f"{reads}, a step takes {self.needed:,.0f}"
        if not self.num_workers:
            return f"{both}: no workers needed"
        if self.num_workers <= self.num_cores:
            return f"{both}: data.num_workers={self.num_workers}"
        return (
            f"{both}: that takes {self.num_workers} workers, and this host has {self.num_cores} "
            "cores. Store examples that take less time to read, or use more hosts"
        )


def measure_data_rate(job: Job) -> DataRate:
    """Reads batches for two seconds, and times a few steps.

    The step is not timed if it is too large for CPUs, or does not fit into memory.

    Args:
      job: The job, with its data.

    Raises:
      UsageError: If the data are a stream.
    """
    if job.stream is not None:
        raise UsageError(
            "the rate of a stream is not measured, as that would take batches of it. Train for "
            "some steps: data_wait_seconds in metrics.jsonl is the time that they wait."
        )
    seconds = _step_seconds(job)
    return DataRate(
        noun="images" if "image" in job.batch_spec else "examples",
        read=_rate_of_reading(job),
        needed=None if seconds is None else count_rows(job.batch_spec) / seconds,
        num_cores=len(os.sched_getaffinity(0)),
    )


def _rate_of_reading(job: Job) -> float:
    batches = job.plain_batches()
    num_rows = job.config.data.global_batch_size / batches.share.num_processes
    positions = itertools.cycle(batches.positions_left())
    batches.batch(next(positions))
    num_read, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < SECONDS or not num_read:
        batches.batch(next(positions))
        num_read += 1
    return num_rows * num_read / spent


def _step_seconds(job: Job) -> float | None:
    if platform(job.ddp.mesh) == "cpu" and _flops(job) > MOST_FLOPS:
        return None
    step = TimedStep(job)
    return step.seconds() if step.memory.fits else None


@dataclass
class TimedStep:
    """A job's step, on rows of ones.

    Attributes:
      job: The job.
    """

    job: Job

    def __post_init__(self) -> None:
        """Compiles the step."""
        ddp, spec = self.job.ddp, self.job.batch_spec
        self._batch = ddp.shard_batch(jax.tree.map(lambda x: np.ones(x.shape, x.dtype), spec))
        self._state = ddp.init(0, self._batch)
        self.memory = memory(ddp, self._batch)
        self.seconds()

    def seconds(self) -> float:
        """The time of a step, on average over a few."""
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            self._state, metrics = self.job.ddp.step(self._state, self._batch)
        jax.block_until_ready(metrics)
        return (time.perf_counter() - start) / NUM_STEPS


def _flops(job: Job) -> float:
    """The operations of a step, of all replicas of this process."""
    steps = job.ddp.steps
    traced = steps.planned(job.batch_spec).traced
    assert traced is not None  # There are rows.
    return sum(count_flops(traced).values()) * steps.rows.num_local_micro_batches
