"""Devices that are only described, to compile for GPUs on a machine without one.

    mesh = described_mesh("h100_sxm", num_hosts=2, devices_per_host=4)
    ddp = jddp.DataParallel(model, optimizer, loss_fn, mesh=mesh)
    program = ddp.steps.lower(batch_shapes).compile().as_text()

It needs JAX's plugin for CUDA, and neither a GPU nor a driver. Nothing can be put on these devices:
they serve for lowering and compiling alone.
"""

import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jddp.engine.mesh import AXIS
from jddp.errors import ConfigError
from jddp.inspection.modelled.gpus import GPUS, target_config
from jddp.names import did_you_mean


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
    if not described and gpu not in GPUS:
        meant = did_you_mean(gpu, GPUS.keys())
        raise ConfigError(f"No GPU {gpu!r} is described.{meant} Known: {', '.join(GPUS)}.")
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=gpu if described else target_config(GPUS[gpu]),
            topology=f"1x{num_hosts}x{devices_per_host}",
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"JAX cannot compile for a GPU that is not there: {reason}. Install the plugin (pip "
            "install 'jddp[aot]'), and set JAX_PLATFORMS=cpu before Python starts."
        ) from error
    return Mesh(np.array(topology.devices), (AXIS,), axis_types=(AxisType.Auto,))
