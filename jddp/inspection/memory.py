"""What a step needs of each device's memory, as the compiler has laid it out.

    print(ddp.memory(batch).total)

What less work at once would bring is reckoned: activations go with the rows that are in work, the
rest does not.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jddp.engine.state import TrainState
from jddp.html import Shown
from jddp.inspection.arrays import Array, largest_arrays
from jddp.inspection.hlo import read_program
from jddp.typing import Batch, PyTree

FIELDS = ("parameters", "gradients", "optimizer", "other_state", "batch", "temporaries")


@dataclass(frozen=True, repr=False)
class Memory(Shown):
    """Bytes of one device while a step runs, and how many there are.

    Attributes:
      parameters: With their moving average, if there is one.
      gradients: One for each parameter.
      optimizer: The optimizer's state.
      other_state: Batch statistics and the like.
      batch: The rows of one device.
      temporaries: Everything else that the compiler asks for: activations above all.
      limit: What the device has.
      largest: The largest arrays that the program makes.
    """

    parameters: int
    gradients: int
    optimizer: int
    other_state: int
    batch: int
    temporaries: int
    limit: int
    largest: tuple[Array, ...] = ()

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.fixed + self.batch + self.temporaries

    @property
    def fixed(self) -> int:
        """What does not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer + self.other_state

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.total <= self.limit

    def __repr__(self) -> str:
        """A table in 80 columns: what a device needs, and what it has."""
        rows = {field: getattr(self, field) for field in FIELDS}
        rows |= {"sum": self.total, "the device has": self.limit}
        sizes = (f"  {name.replace('_', ' '):<15}{x / 2**20:>12,.2f}" for name, x in rows.items())
        return "\n".join(["memory per device, MiB", *sizes])

    def cuts(self, num_rows: int) -> Iterator[int]:
        """Into how many parts the rows of a device would have to be cut to fit, by reckoning."""
        room = self.limit - self.fixed
        for parts in range(2, num_rows + 1):
            if num_rows % parts == 0 and (self.batch + self.temporaries) / parts <= room:
                yield parts


def measure_memory(
    lowered: jax.stages.Lowered, state: TrainState, batch: Batch, mesh: Mesh
) -> Memory:
    """Compiles a step and reads what it needs.

    Args:
      lowered: The step.
      state: Its state, or its shapes.
      batch: The rows of this process, or their shapes.
      mesh: Where it runs.
    """
    compiled = lowered.compile()
    analysis, text = compiled.memory_analysis(), compiled.as_text()
    assert analysis is not None, "CPUs and GPUs have one"
    gradients = _bytes_per_device(state.params)
    # The new state takes the place of the old one, which is donated.
    beyond = analysis.temp_size_in_bytes + max(
        0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    )
    return Memory(
        parameters=_bytes_per_device((state.params, state.ema_params)),
        gradients=gradients,
        optimizer=_bytes_per_device(state.opt_state),
        other_state=_bytes_per_device((state.model_state, state.comm_state)),
        batch=_bytes_per_device(batch) // len(mesh.local_devices),
        temporaries=max(0, beyond - gradients),
        limit=_device_limit(mesh.local_devices),
        largest=largest_arrays(read_program(text or "")),
    )


def in_words(size: float) -> str:
    """Bytes, in the unit that suits them: "12.5 GiB"."""
    unit = "GiB" if size >= 2**30 else "MiB"
    return f"{size / (2**30 if unit == 'GiB' else 2**20):,.1f} {unit}"


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
