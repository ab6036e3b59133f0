"""Say what a run would be and need, by compiling its step for shapes: nothing is run or written.

    print(preview(job))

Sizes per device come from the compiler. What a change of options would bring is reckoned from
them: activations go with the rows that are in work at once, the rest does not.
"""

import math
import os
from dataclasses import dataclass
from typing import Any

import jax

from jddp.build.job import Job
from jddp.names import accepted_names
from jddp.state import TrainState

PyTree = Any
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Memory:
    """Bytes of one device while a step runs, and how many there are.

    Attributes:
      parameters: With their moving average, if there is one.
      gradients: One for each parameter.
      optimizer: The optimizer's state.
      other_state: Batch statistics and the like.
      batch: The rows of one device.
      temporaries: Everything else that the compiler asks for: activations above all.
      limit: What the device has.
    """

    parameters: int
    gradients: int
    optimizer: int
    other_state: int
    batch: int
    temporaries: int
    limit: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.fixed + self.batch + self.temporaries

    @property
    def fixed(self) -> int:
        """What does not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer + self.other_state


def preview(job: Job) -> str:
    """Returns model size, batch arithmetic, mesh, bucket plan and memory, in 80 columns."""
    state = job.ddp.abstract_state(job.batch_spec)
    memory = measure_memory(job, state)
    return "\n\n".join(
        ["\n".join(_arithmetic(job)), str(job.ddp.plan), "\n".join(memory_table(job, memory))]
    )


def measure_memory(job: Job, state: TrainState) -> Memory:
    """Compiles the step of `job` and returns what it needs on each device."""
    analysis = job.ddp.lower(job.batch_spec).compile().memory_analysis()
    assert analysis is not None, "CPUs and GPUs have one"
    gradients = _bytes_per_device(state.params)
    # The new state takes the place of the old one, which is donated.
    beyond = analysis.temp_size_in_bytes + max(
        0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    )
    rows = _bytes_per_device(job.batch_spec) // len(job.ddp.mesh.local_devices)
    return Memory(
        parameters=_bytes_per_device((state.params, state.ema_params)),
        gradients=gradients,
        optimizer=_bytes_per_device(state.opt_state),
        other_state=_bytes_per_device((state.model_state, state.comm_state)),
        batch=rows,
        temporaries=max(0, beyond - gradients),
        limit=_device_limit(job.ddp.mesh.local_devices),
    )


def _bytes_per_device(tree: PyTree) -> int:
    """Bytes of the shard of every leaf that lies on one device."""

    def size(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def _device_limit(devices: list[jax.Device]) -> int:
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return host // len(devices)  # Virtual devices share the memory of their host.


def _arithmetic(job: Job) -> list[str]:
    config, mesh = job.config, job.ddp.mesh
    size, parts = config.data.global_batch_size, config.ddp.accumulate_steps
    processes = jax.process_count()
    rows = processes * next(iter(job.batch_spec.values())).shape[0]
    share, padding = rows // mesh.size, f" and {rows - size} of padding" * (rows > size)
    micro = f" in {parts} micro-steps of {share // parts}" if parts > 1 else ""
    if job.data is None or job.num_steps is None:
        length = f"{job.num_steps or 'unknown'}: the data are not here"
    else:
        epochs = job.num_steps * size / len(job.data.train)
        length = f"{job.num_steps:,} = {epochs:.4g} epochs of {len(job.data.train):,} examples"
    return [
        f"mesh     data={mesh.size} x {mesh.devices.flat[0].device_kind}, "
        f"{processes} process{'es' * (processes > 1)}",
        f"batch    {size} a step{padding} = {processes} x {rows // processes} a process "
        f"= {mesh.size} x {share} a replica{micro}",
        f"steps    {length}",
    ]


def memory_table(job: Job, memory: Memory) -> list[str]:
    """Returns lines that hold what a device needs against what it has."""
    rows = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "other state": memory.other_state,
        "batch": memory.batch,
        "temporaries": memory.temporaries,
        "sum": memory.total,
        "the device has": memory.limit,
    }
    lines = ["memory per device, MiB"]
    lines += [f"  {name:<15}{_mebibytes(size):>12}" for name, size in rows.items()]
    if memory.total <= memory.limit:
        return [*lines, f"fits: {memory.total / memory.limit:.1%} of the device"]
    return [*lines, "does not fit; what would make it smaller", *_ways_out(job, memory)]


def _ways_out(job: Job, memory: Memory) -> list[str]:
    """Returns the options that would make it fit, with what they would bring."""
    room = memory.limit - memory.fixed
    if room <= 0:
        return [
            "  the state alone is larger than the device: choose a smaller model, an",
            "  optimizer with less state, or devices with more memory",
        ]
    activations = memory.batch + memory.temporaries
    parts = job.config.ddp.accumulate_steps
    rows = job.config.data.global_batch_size // job.ddp.mesh.size // parts
    divisors = [k for k in range(2, rows + 1) if rows % k == 0]
    cut = next((k for k in divisors if activations / k <= room), rows)
    ways = []
    if rows > 1:
        smaller = job.config.data.global_batch_size // cut
        ways += [(f"ddp.accumulate_steps={parts * cut}", activations / cut)]
        ways += [(f"data.global_batch_size={smaller}", activations / cut)]
    if _takes(job, "dtype"):
        ways += [("model.kwargs.dtype=bfloat16", activations / 2)]
    lines = []
    for way, size in ways:
        enough = "" if size <= room else ", not enough alone"
        lines.append(f"  {way}: about {_mebibytes(memory.fixed + size)} MiB{enough}")
    if _takes(job, "remat"):
        lines.append("  model.kwargs.remat=true: activations are computed twice, not kept")
    return lines or ["  one row a device is too large: choose a smaller model"]


def _takes(job: Job, name: str) -> bool:
    """Whether the model takes an argument that saves memory, and was not given it."""
    given = job.config.model.kwargs.get(name)
    return not given and name in accepted_names(type(job.parts.model), key="model")


def _mebibytes(size: float) -> str:
    return f"{size / MEBIBYTE:,.2f}"
