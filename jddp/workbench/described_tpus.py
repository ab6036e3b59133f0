"""TPUs that are only described, and steps that are compiled for them on a machine without one.

    target = described("v5e", "2x4")            # a slice of 8 chips; of "h100", a `Target`
    step = step_on_tpus(target, compile_for(target, ddp.steps, rows))

It needs libtpu (`jddp[tpu]`). The collectives and the memory of a chip are read in the compiled
program; times are not modelled, since libtpu describes no rates of its links.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jddp.engine.mesh import AXIS, count_processes
from jddp.ground.errors import ConfigError
from jddp.ground.typing import MEBIBYTE, JsonObject, Shown
from jddp.inspection.memory import FIELDS, Memory, assigned_memory
from jddp.workbench.described import CompiledFor, Target

# Memory of a device in GiB, and the smallest slice of a host. A device of v4 is one of the two
# cores of its chip. https://cloud.google.com/tpu/docs/system-architecture-tpu-vm
GIBIBYTE = 1024 * MEBIBYTE
GENERATIONS = {"v4": (16, "2x2x1"), "v5e": (16, "2x2"), "v5p": (95, "2x2x1"), "v6e": (32, "2x2")}
# Without these variables libtpu asks the metadata server of Google Cloud, which is not there, and
# prints that it found no TPU.
ELSEWHERE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@dataclass(frozen=True)
class TpuSlice:
    """A slice of TPUs for which a step is compiled.

    Attributes:
      generation: A key of `GENERATIONS`.
      topology: Chips along each dim of the slice, "2x4".
    """

    generation: str
    topology: str

    def __str__(self) -> str:
        """Number and name of the devices, such as "8 x TPU v5 lite on 2 hosts"."""
        devices, num = self.mesh().devices, self.num_hosts
        on = "1 host" if num == 1 else f"{num} hosts"
        return f"{devices.size} x {devices.flat[0].device_kind} on {on}"

    @property
    def num_hosts(self) -> int:
        """Number of hosts, each a process of its own."""
        return count_processes(self.mesh())

    def mesh(self) -> Mesh:
        """The described devices.

        Raises:
          ConfigError: If the slice is none of this generation, or libtpu is not installed.
        """
        for variable, value in ELSEWHERE.items():
            os.environ.setdefault(variable, value)
        name = f"{self.generation}:{self.topology}"
        try:
            devices = topologies.get_topology_desc(name, platform="tpu").devices
        except Exception as error:  # JAX raises errors of several classes here.
            reason, (_, host) = str(error).splitlines()[0].rstrip("."), GENERATIONS[self.generation]
            raise ConfigError(
                f"JAX cannot compile for a slice {name}: {reason}. Install libtpu (pip install "
                f"'jddp[tpu]'), and give the chips along each dim, such as --topology {host}."
            ) from error
        return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def described(name: str, topology: str, links: Sequence[str] = ()) -> Target | TpuSlice:
    """Returns the described devices of a user's words.

    Args:
      name: A generation of TPUs, or a GPU.
      topology: Chips along each dim of a slice, or hosts and GPUs of each.
      links: Links that replace the links of GPUs.

    Raises:
      ConfigError: If one of them is unknown or malformed, or there are links of TPUs.
    """
    if name not in GENERATIONS:
        return Target.named(name, topology, links)
    if links:
        raise ConfigError("Links of TPUs are not modelled: leave --link out.")
    return TpuSlice(name, topology)


@dataclass(frozen=True, repr=False)
class StepOnTpus(Shown):
    """A step that was compiled for TPUs.

    Attributes:
      target: The slice.
      memory: Memory of the step on each device.
    """

    target: TpuSlice
    memory: Memory

    def __repr__(self) -> str:
        """The devices, and the memory that the step takes of each."""
        needed, limit = self.memory.total / GIBIBYTE, self.memory.limit / GIBIBYTE
        return (
            f"Compiled for {self.target}, and not run; times of TPUs are not modelled.\n"
            f"A step takes {needed:.3g} GiB of the {limit:g} GiB of a device."
        )

    def as_json(self) -> JsonObject:
        """The same as numbers; sizes are in bytes."""
        memory = {name: getattr(self.memory, name) for name in FIELDS}
        return {"target": str(self.target), "memory": memory, "memory_limit": self.memory.limit}


def step_on_tpus(target: TpuSlice, own: CompiledFor) -> StepOnTpus:
    """Reads the memory of a step that was compiled for a slice."""
    limit = GENERATIONS[target.generation][0] * GIBIBYTE
    return StepOnTpus(target, assigned_memory(own.compiled, own.steps, own.rows, limit))
