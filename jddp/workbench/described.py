"""GPUs that are only described, and steps that are compiled for them on a machine without one.

    target = Target.named("h100", "8x8")
    own = compile_for(target, ddp.steps, rows_of_host(target, ddp.steps, batch))
    mesh = described_mesh("h100_sxm", num_hosts=2, devices_per_host=4)    # without links

It needs JAX's plugin for CUDA, and neither a GPU nor a driver. Nothing can be put on these devices:
they serve for lowering and compiling alone.

Figures of a GPU are the vendor's; XLA compiles for a GPU that is described by them. Rates are
assumed; the model in `schedule` is as good as they are, so vary them before you believe it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jddp.engine.compiled import CompiledSteps
from jddp.engine.mesh import AXIS, count_processes
from jddp.ground.errors import ConfigError
from jddp.ground.names import did_you_mean
from jddp.ground.typing import MEBIBYTE, Batch, Shaped
from jddp.inspection.hlo import HloProgram, read_program
from jddp.workbench.links import AMPERE, HOPPER, Fabric, Link, with_links


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU: figures first, then the rates assumed.

    Attributes:
      name: Name of the vendor for it.
      compute_capability: Major and minor.
      num_cores: Streaming multiprocessors.
      fpus_per_core: Units for float32 arithmetic in each.
      clock_ghz: Highest clock.
      memory_bytes: Memory of the device.
      memory_bandwidth: Bytes a second, at most.
      l2_cache_bytes: Size of the second-level cache.
      shared_memory_per_block: Bytes that a block may have without asking.
      shared_memory_per_block_optin: Bytes that it may ask for.
      registers_per_block: Registers of 32 bits.
      threads_per_warp: Threads that run in step.
      block_dim_x: Blocks in the longest dim of a grid.
      product_flops: Operations a second in matrix products of 16-bit numbers.
      convolution_flops: The same in convolutions.
      bytes_per_second: Bytes to and from memory, in kernels that compute little.
      kernel_seconds: Added by each kernel.
      links: Links to other GPUs, by name.
    """

    name: str
    compute_capability: tuple[int, int]
    num_cores: int
    fpus_per_core: int
    clock_ghz: float
    memory_bytes: int
    memory_bandwidth: int
    l2_cache_bytes: int
    shared_memory_per_block: int
    shared_memory_per_block_optin: int
    registers_per_block: int
    threads_per_warp: int
    block_dim_x: int
    product_flops: float
    convolution_flops: float
    bytes_per_second: float
    kernel_seconds: float
    links: Mapping[str, Link]


_H100 = Gpu(
    # "NVIDIA H100 Tensor Core GPU" data sheet (resources.nvidia.com/en-us-tensor-core), column
    # H100 SXM: 80 GB, 3.35 TB/s, and 989 TFLOP/s of dense bfloat16.
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=80 * 10**9,
    memory_bandwidth=3_350 * 10**9,
    # "NVIDIA H100 Tensor Core GPU Architecture" (white paper), table "Comparison of NVIDIA A100
    # and H100": 132 SMs with 128 FP32 cores, 50 MB of L2, 1,980 MHz outside tensor cores.
    num_cores=132,
    fpus_per_core=128,
    clock_ghz=1.98,
    l2_cache_bytes=50 * MEBIBYTE,
    # "CUDA C++ Programming Guide", appendix "Compute Capabilities", tables of features and of
    # technical specifications, column 9.0.
    # https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
    compute_capability=(9, 0),
    threads_per_warp=32,
    block_dim_x=2**31 - 1,
    registers_per_block=64 * 1024,
    shared_memory_per_block=48 * 1024,
    shared_memory_per_block_optin=227 * 1024,
    # Assumed: two thirds of the peak in products, less in convolutions, 80% of the bandwidth.
    product_flops=650e12,
    convolution_flops=450e12,
    bytes_per_second=2.7e12,
    kernel_seconds=2e-6,
    links=HOPPER,
)
GPUS = {
    "h100_sxm": _H100,
    # "NVIDIA H200 Tensor Core GPU" data sheet, column H200 SXM: an H100 with 141 GB at 4.8 TB/s.
    "h200_sxm": replace(
        _H100,
        name="NVIDIA H200",
        memory_bytes=141 * 10**9,
        memory_bandwidth=4_800 * 10**9,
        bytes_per_second=3.8e12,
    ),
    "a100_sxm": replace(
        _H100,
        # "NVIDIA A100 Tensor Core GPU" data sheet, column A100 80GB SXM: 80 GB, 2,039 GB/s, and 312
        # TFLOP/s of dense bfloat16. "NVIDIA A100 Tensor Core GPU Architecture" (white paper): 108
        # SMs with 64 FP32 cores, 40 MB of L2, 1,410 MHz.
        name="NVIDIA A100-SXM4-80GB",
        memory_bytes=80 * 10**9,
        memory_bandwidth=2_039 * 10**9,
        num_cores=108,
        fpus_per_core=64,
        clock_ghz=1.41,
        l2_cache_bytes=40 * MEBIBYTE,
        # As above, column 8.0, whose other figures are the same.
        compute_capability=(8, 0),
        shared_memory_per_block_optin=163 * 1024,
        # Assumed: the same shares of the peaks as above.
        product_flops=205e12,
        convolution_flops=142e12,
        bytes_per_second=1.64e12,
        links=AMPERE,
    ),
}


def target_config(gpu: Gpu) -> str:
    """Describes a GPU as XLA asks for it: a `GpuTargetConfigProto`, as text.

    It has the fields that a compile needs, the fields that change the program, and the name.
    """
    major, minor = gpu.compute_capability
    fields = {
        "block_dim_limit_x": gpu.block_dim_x,
        "clock_rate_ghz": gpu.clock_ghz,
        "core_count": gpu.num_cores,
        "cuda_compute_capability": f"{{ major: {major} minor: {minor} }}",
        "device_memory_size": gpu.memory_bytes,
        "fpus_per_core": gpu.fpus_per_core,
        "l2_cache_size": gpu.l2_cache_bytes,
        "memory_bandwidth": gpu.memory_bandwidth,
        "registers_per_block_limit": gpu.registers_per_block,
        "shared_memory_per_block": gpu.shared_memory_per_block,
        "shared_memory_per_block_optin": gpu.shared_memory_per_block_optin,
        "threads_per_warp": gpu.threads_per_warp,
    }
    lines = "\n".join(f"  {name}: {value}" for name, value in fields.items())
    return f'gpu_device_info {{\n{lines}\n}}\ndevice_description_str: "{gpu.name}"\n'


def described_mesh(gpu: str = "h100_sxm", *, num_hosts: int = 1, devices_per_host: int = 8) -> Mesh:
    """Returns a mesh of GPUs that need not be there, along the one axis "data".

    Args:
      gpu: A key of `GPUS`; or a GPU's description of itself, as text (`GpuTargetConfigProto`).
      num_hosts: Hosts, each a process of its own.
      devices_per_host: GPUs of each.

    Raises:
      ConfigError: If the GPU is unknown, or JAX cannot compile for it here.
    """
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=gpu if "gpu_device_info" in gpu else target_config(_gpu(gpu)),
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
          links: Links that replace the GPU's links, "NAME=BANDWIDTH,LATENCY".

        Raises:
          ConfigError: If one of them is unknown or malformed.
        """
        found = _gpu(gpu)
        return cls(found, Fabric(*_hosts_and_gpus(topology), with_links(found.links, links)))

    def __str__(self) -> str:
        """Number and name of the GPUs, such as "8 x NVIDIA H100 80GB HBM3"."""
        return f"{self.fabric.num_devices} x {self.gpu.name}"

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return self.fabric.num_hosts

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


class Described(Protocol):
    """Devices that a step is compiled for: a `Target`, or a slice of TPUs."""

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""

    def mesh(self) -> Mesh:
        """The described devices."""


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


class CompiledFor(NamedTuple):
    """A step that was compiled for described GPUs.

    Attributes:
      steps: The step on their mesh.
      rows: Shapes of the rows of one host.
      compiled: The program.
    """

    steps: CompiledSteps
    rows: Batch
    compiled: jax.stages.Compiled

    @property
    def program(self) -> HloProgram:
        """The program as it was scheduled."""
        return read_program(self.compiled.as_text() or "")


def compile_for(target: Described, steps: CompiledSteps, rows: Batch) -> CompiledFor:
    """Compiles a step for other devices than its own.

    Args:
      target: The devices.
      steps: The step.
      rows: Shapes of the rows of one host of the target.

    Raises:
      ConfigError: If JAX cannot compile for the target, the rows do not divide over it, or the
        step does not compile for it.
    """
    other = steps.on(target.mesh())
    other.rows.check(rows)
    lowered = other.lower(rows)
    try:
        return CompiledFor(other, rows, lowered.compile())
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"The step does not compile for {target}: {reason}. Change what the compiler names, or "
            "explain the step for the devices at hand, without a target."
        ) from error


def num_rows(batch: Batch) -> int:
    """Number of rows of a batch, whose arrays have equally many."""
    return int(jax.tree.leaves(batch)[0].shape[0])


def rows_of_host(target: Described, steps: CompiledSteps, batch: Batch) -> Batch:
    """Divides a global batch over the hosts of a target.

    Args:
      target: The devices.
      steps: The step.
      batch: Rows of one process of the step's own mesh, or their shapes.

    Returns:
      Shapes of the rows of one host.

    Raises:
      ConfigError: If the rows do not divide over the hosts.
    """
    rows, num_hosts = count_processes(steps.mesh) * num_rows(batch), target.num_hosts
    if rows % num_hosts:
        raise ConfigError(
            f"A batch of {rows} rows does not divide over {num_hosts} hosts. "
            f"Choose a multiple of {num_hosts}."
        )

    def shape(x: Shaped) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows // num_hosts, *x.shape[1:]), x.dtype)

    return jax.tree.map(shape, batch)
