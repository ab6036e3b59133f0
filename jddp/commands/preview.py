"""Describes a run, its memory and the rate of its data: nothing is trained or written.

    print(preview(job))

Sizes per device come from the compiler; the effect of a model's options is estimated from them. A
few steps are timed on rows of ones, and batches are read for two seconds.
"""

import dataclasses
import math
import textwrap

from jddp.data import DataSet
from jddp.inspection.memory import Memory, in_words
from jddp.inspection.memory import memory as memory_of
from jddp.job.data_rate import measure_data_rate
from jddp.job.job import Job
from jddp.job.optimizers import optimizer_table
from jddp.names import accepted_names
from jddp.trainer.out_of_memory import NOTHING_FITS, ways_out
from jddp.trainer.prefetch import NUM_AHEAD


def preview(job: Job) -> str:
    """Returns the bucket plan, groups of the optimizer, memory, and whether data keep up."""
    memory = memory_of(job.ddp, job.batch_spec)
    optimizers = optimizer_table(job.config, job.ddp.steps.abstract_state(job.batch_spec))
    parts = [
        [str(job.ddp.steps.planned(job.batch_spec).plan)],
        optimizers,
        memory_table(job, memory),
        _data_rate(job),
    ]
    return "\n\n".join(filter(None, map("\n".join, parts)))


def _data_rate(job: Job) -> list[str]:
    """Returns a line on the rate of the examples; of a stream nothing is read to measure it."""
    if not isinstance(job.data, DataSet):
        return []
    return textwrap.wrap(f"data: {measure_data_rate(job)}", 78)


def memory_table(job: Job, memory: Memory) -> list[str]:
    """Returns lines with the memory that a device needs and has."""
    memory = dataclasses.replace(memory, batch=(1 + NUM_AHEAD) * memory.batch)
    table = f"{memory!r}\nbatch: one batch for the step, and {NUM_AHEAD} prefetched batches"
    if memory.limit == math.inf:
        return [table, "the device does not report its memory: whether it fits is unknown"]
    if memory.fits:
        return [table, f"fits: {memory.peak / memory.limit:.1%} of the device"]
    return [table, "does not fit; these settings would make it smaller", *_ways_out(job, memory)]


def _ways_out(job: Job, memory: Memory) -> list[str]:
    """Returns the settings that would make it fit, with the memory that they would need."""
    ways = list(ways_out(job.ddp, job.batch_spec, memory))
    half = memory.fixed + (memory.batch + memory.temporaries) // 2
    if _takes(job, "dtype") and max(half, memory.start) <= memory.limit:
        ways.append(f"model.kwargs.dtype=bfloat16 (about {in_words(half)})")
    if _takes(job, "remat") and max(memory.fixed, memory.start) < memory.limit:
        ways.append("model.kwargs.remat=true: activations are computed twice, not kept")
    return [f"  {line}" for line in ways or textwrap.wrap(NOTHING_FITS, 78)]


def _takes(job: Job, name: str) -> bool:
    """Whether the model takes this argument, which saves memory, and did not get it."""
    given = job.config.model.kwargs.get(name)
    return not given and name in accepted_names(type(job.parts.model), key="model")
