"""Devices that are only described, to compile for GPUs on a machine without one.

    mesh = described_mesh("h100_sxm", num_hosts=2, devices_per_host=4)
    ddp = jddp.DataParallel(model, optimizer, loss_fn, mesh=mesh)
    program = ddp.steps.lower(batch_shapes).compile().as_text()

It needs JAX's plugin for CUDA, and neither a GPU nor a driver. Nothing can be put on these devices:
they serve for lowering and compiling alone. A `Target` is such devices with their links, as a user
names them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jddp.engine.mesh import AXIS
from jddp.errors import ConfigError
from jddp.names import did_you_mean
from jddp.workbench.modelled.gpus import GPUS, Gpu, target_config
from jddp.workbench.modelled.links import Fabric, with_links


def described_mesh(gpu: str = "h100_sxm", *, num_hosts: int = 1, devices_per_host: int = 8) -> Mesh:
    """Returns a mesh of GPUs that need not be there, along the one axis "data".

    Args:
      gpu: A key of `GPUS`; or a GPU's description of itself, as text (`GpuTargetConfigProto`).
      num_hosts: Hosts, each a process of its own.
      devices_per_host: GPUs of each.

    Raises:
      ConfigError: If the GPU is unknown, or JAX cannot compile for it here.
    """
    described = "gpu_device_info" in gpu
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=gpu if described else target_config(_gpu(gpu)),
            topology=f"1x{num_hosts}x{devices_per_host}",
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        found = f"JAX cannot compile for a GPU that is not there: {reason}."
        raise ConfigError(
            f"{found} Install the plugin (pip install 'jddp[aot]'), and set JAX_PLATFORMS=cpu "
            "before Python starts.",
            in_shell=f"{found} Install the plugin: pip install 'jddp[aot]'.",
        ) from error
    return Mesh(np.array(topology.devices), (AXIS,), axis_types=(AxisType.Auto,))


@dataclass(frozen=True)
class Target:
    """GPUs that a step is compiled for, and the links between them.

    Attributes:
      gpu: The GPU.
      fabric: Hosts, GPUs of each, and links.
    """

    gpu: Gpu
    fabric: Fabric

    @classmethod
    def named(cls, gpu: str, topology: str = "1x8", links: Sequence[str] = ()) -> "Target":
        """Returns the target of a user's words.

        Args:
          gpu: A key of `GPUS`, or its beginning: "h100".
          topology: Hosts and GPUs of each, "HOSTSxGPUS".
          links: Links in the place of those of the GPU, "NAME=BANDWIDTH,LATENCY".

        Raises:
          ConfigError: If one of them is unknown or malformed.
        """
        found = _gpu(gpu)
        return cls(found, Fabric(*_hosts_and_gpus(topology), with_links(found.links, links)))

    def __str__(self) -> str:
        """Number and name of the GPUs, such as "8 x NVIDIA H100 80GB HBM3"."""
        return f"{self.fabric.num_devices} x {self.gpu.name}"

    def mesh(self) -> Mesh:
        """The described devices.

        Raises:
          ConfigError: If JAX cannot compile for them here.
        """
        return described_mesh(
            target_config(self.gpu),
            num_hosts=self.fabric.num_hosts,
            devices_per_host=self.fabric.devices_per_host,
        )


def _gpu(name: str) -> Gpu:
    """The GPU whose key this is, or begins with it."""
    for key in GPUS:
        if name and f"{key}_".startswith(f"{name.lower()}_"):
            return GPUS[key]
    meant = did_you_mean(name, GPUS.keys())
    raise ConfigError(f"No GPU {name!r} is described.{meant} Known: {', '.join(GPUS)}.")


def _hosts_and_gpus(topology: str) -> tuple[int, int]:
    if found := re.fullmatch(r"([1-9]\d{0,3})[xX]([1-9]\d{0,2})", topology):
        return int(found[1]), int(found[2])
    num = int(topology) if re.fullmatch(r"[1-9]\d{0,5}", topology) else 0
    meant = f" Did you mean '{max(1, num // 8)}x{min(num, 8)}'?" if num else ""
    raise ConfigError(
        f"Topology {topology!r} is not HOSTSxGPUS, such as 8x8 for 8 hosts of 8 GPUs each.{meant}"
    )
