"""Describes a run and its memory by compiling its step: nothing is run or written.

    print(preview(job))

Sizes per device come from the compiler; the effect of a model's options is estimated from them.
"""

import dataclasses
import math
import textwrap

from jddp.inspection.memory import Memory, in_words
from jddp.inspection.memory import memory as memory_of
from jddp.job.job import Job
from jddp.job.optimizers import optimizer_table
from jddp.names import accepted_names
from jddp.trainer.out_of_memory import NOTHING_FITS, ways_out
from jddp.trainer.prefetch import NUM_AHEAD


def preview(job: Job) -> str:
    """Returns the bucket plan, groups of the optimizer and memory."""
    memory = memory_of(job.ddp, job.batch_spec)
    optimizers = optimizer_table(job.config, job.ddp.steps.abstract_state(job.batch_spec))
    parts = [
        [str(job.ddp.steps.planned(job.batch_spec).plan)],
        optimizers,
        memory_table(job, memory),
    ]
    return "\n\n".join(filter(None, map("\n".join, parts)))


def memory_table(job: Job, memory: Memory) -> list[str]:
    """Returns lines with the memory that a device needs and has."""
    memory = dataclasses.replace(memory, batch=(1 + NUM_AHEAD) * memory.batch)
    table = f"{memory!r}\nbatch: one batch for the step, and {NUM_AHEAD} prefetched batches"
    if memory.limit == math.inf:
        return [table, "the device does not report its memory: whether it fits is unknown"]
    if memory.fits:
        return [table, f"fits: {memory.total / memory.limit:.1%} of the device"]
    return [table, "does not fit; these settings would make it smaller", *_ways_out(job, memory)]


def _ways_out(job: Job, memory: Memory) -> list[str]:
    """Returns the settings that would make it fit, with the memory that they would need."""
    ways = list(ways_out(job.ddp, job.batch_spec, memory))
    half = memory.fixed + (memory.batch + memory.temporaries) // 2
    if _takes(job, "dtype") and half <= memory.limit:
        ways.append(f"model.kwargs.dtype=bfloat16 (about {in_words(half)})")
    if _takes(job, "remat") and memory.fixed < memory.limit:
        ways.append("model.kwargs.remat=true: activations are computed twice, not kept")
    return [f"  {line}" for line in ways or textwrap.wrap(NOTHING_FITS, 78)]


def _takes(job: Job, name: str) -> bool:
    """Whether the model takes this argument, which saves memory, and did not get it."""
    given = job.config.model.kwargs.get(name)
    return not given and name in accepted_names(type(job.parts.model), key="model")
