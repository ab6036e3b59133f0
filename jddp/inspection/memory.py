"""The memory that a step and its first state need on each device, as assigned by the compiler.

    print(jddp.memory(ddp, batch).total)

The memory of smaller batches is estimated: activations are proportional to the rows that are
computed at once, and the rest is constant.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax

from jddp.distributed.gpus import smallest_bytes
from jddp.engine.compiled import CompiledSteps, Trainable
from jddp.ground.typing import Batch, PyTree, Shown
from jddp.modules.rows import count_rows

FIELDS = ("parameters", "gradients", "optimizer", "other_state", "batch", "temporaries")
NOTHING_FITS = (
    "One row at a time is too much: choose a smaller model, or an optimizer with less state."
)


@dataclass(frozen=True, repr=False)
class Memory(Shown):
    """Bytes that a step uses on one device, and the device's memory.

    Attributes:
      parameters: Bytes of the parameters and their moving average, if there is one.
      gradients: Bytes of the gradients that are there at once.
      optimizer: Bytes of the optimizer's state.
      other_state: Bytes of batch statistics and the like.
      batch: Bytes of the rows of one device.
      temporaries: Other bytes that the compiler needs, mostly for activations.
      limit: Bytes of the device's memory; infinite if it is not known.
      start: Bytes at the peak of `init`, by which a seed makes the state; 0 if it is not known.
    """

    parameters: int
    gradients: int
    optimizer: int
    other_state: int
    batch: int
    temporaries: int
    limit: float
    start: int = 0

    @property
    def total(self) -> int:
        """Bytes of a step."""
        return self.fixed + self.batch + self.temporaries

    @property
    def peak(self) -> int:
        """Bytes of a step, or of the start where that needs more."""
        return max(self.total, self.start)

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer + self.other_state

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory."""
        return self.peak <= self.limit

    def __repr__(self) -> str:
        """A table of 80 columns: memory that it needs on a device, and the device's own."""
        rows = {field.replace("_", " "): getattr(self, field) for field in FIELDS}
        rows |= {"sum": self.total, **({"start (init)": self.start} if self.start else {})}
        rows["the device has"] = self.limit
        lines = ["memory per device, MiB"]
        for name, x in rows.items():
            size = "unknown" if x == math.inf else f"{x / 2**20:,.2f}"
            lines.append(f"  {name:<15}{size:>12}")
        return "\n".join(lines)

    def cuts(self, num_rows: int) -> Iterator[int]:
        """Numbers of micro-batches with which a step is estimated to fit, in rising order."""
        room = self.limit - self.fixed if self.start <= self.limit else -1
        for num in range(2, num_rows + 1):
            if num_rows % num == 0 and (self.batch + self.temporaries) / num <= room:
                yield num


def memory(ddp: Trainable, batch: Batch, *, accumulate_steps: int | None = None) -> Memory:
    """Compiles a step and `init`, and reports their memory on each device; runs nothing.

    Args:
      ddp: A `jddp.DataParallel`.
      batch: This process's rows, or their `jax.ShapeDtypeStruct`s.
      accumulate_steps: Number of micro-batches of another step, for comparison.
    """
    compiled = ddp.steps.lower(batch, accumulate_steps).compile()
    step = assigned_memory(compiled, ddp.steps, batch, _device_limit(ddp.mesh.local_devices))
    init = ddp.steps.lower_init(batch).compile()
    # The state of a hook is made after the rest.
    return replace(step, start=max(compiled_bytes(init), step.fixed - step.gradients))


def ways_out(ddp: Trainable, batch: Batch, needed: Memory) -> Iterator[str]:
    """The micro-batches, and the smaller global batch, with which a compiled step fits, if any.

    Args:
      ddp: A `jddp.DataParallel`, which steps.
      batch: Shapes of this process's rows.
      needed: Memory of the step, which does not fit.
    """
    accumulate_steps, num_rows = ddp.steps.rows.accumulate_steps, count_rows(batch)
    cuts = list(needed.cuts(num_rows // len(ddp.mesh.local_devices) // accumulate_steps))
    for num_steps in (accumulate_steps * cut for cut in cuts):
        if (smaller := memory(ddp, batch, accumulate_steps=num_steps)).fits:
            yield f"accumulate_steps={num_steps} ({in_words(smaller.total)})"
            break
    for rows in (num_rows // cut for cut in cuts):
        fewer = jax.tree.map(lambda x, rows=rows: x.update(shape=(rows, *x.shape[1:])), batch)
        if (smaller := memory(ddp, fewer)).fits:
            yield f"a global batch of {rows * jax.process_count()} ({in_words(smaller.total)})"
            break


def assigned_memory(
    compiled: jax.stages.Compiled, steps: CompiledSteps, batch: Batch, limit: float
) -> Memory:
    """The memory that a compiled step needs on each device; `limit` is the memory that it has."""
    state = steps.abstract_state(batch)
    analysis = compiled.memory_analysis()
    assert analysis is not None, "CPUs and GPUs have one"
    beside_arguments = compiled_bytes(compiled) - analysis.argument_size_in_bytes
    # Where each gradient is sent as soon as it is computed, they are never all there at once.
    gradients = min(_bytes_per_device(state.params), beside_arguments)
    return Memory(
        parameters=_bytes_per_device((state.params, state.ema_params)),
        gradients=gradients,
        optimizer=_bytes_per_device(state.opt_state),
        other_state=_bytes_per_device((state.model_state, state.ema_state, state.comm_state)),
        batch=_bytes_per_device(batch) // len(steps.mesh.local_devices),
        temporaries=beside_arguments - gradients,
        limit=limit,
    )


def compiled_bytes(compiled: jax.stages.Compiled) -> int:
    """The memory that the compiler has assigned to a program on each device."""
    analysis = compiled.memory_analysis()
    assert analysis is not None, "CPUs and GPUs have one"
    # The new state takes the place of the old one, which is donated.
    beyond = max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
    return int(analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + beyond)


def peak_bytes(devices: Sequence[jax.Device]) -> int | None:
    """The most memory that one of the devices has given out so far; None without statistics."""
    return max(_known(devices, "peak_bytes_in_use"), default=None)


def limit_bytes(devices: Sequence[jax.Device]) -> int | None:
    """The memory that each of the devices can give out at most; None without statistics."""
    return min(_known(devices, "bytes_limit"), default=None)


def _known(devices: Sequence[jax.Device], name: str) -> list[int]:
    known = [(device.memory_stats() or {}).get(name) for device in devices]
    return [x for x in known if x]


def in_words(size: float) -> str:
    """Bytes in MiB or GiB, such as "12.5 GiB"."""
    if size == math.inf:
        return "an unknown size"
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def _bytes_per_device(tree: PyTree) -> int:
    """Bytes of the shards of all leaves on one device."""

    def size(leaf: jax.ShapeDtypeStruct) -> int:
        sharding = getattr(leaf, "sharding", None)  # None for an array of the host.
        shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def _device_limit(devices: list[jax.Device]) -> float:
    known = limit_bytes(devices[:1])
    if known is None and devices[0].platform == "cpu":
        # Virtual devices share the memory of their host.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    # A GPU has no statistics under XLA_PYTHON_CLIENT_ALLOCATOR=platform.
    return known or smallest_bytes() or math.inf
