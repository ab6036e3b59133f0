"""What public documents say of GPUs and of the networks between them, and the rates assumed.

    gpu = GPUS["h100_sxm"]
    network = make_network(num_hosts=2, devices_per_host=4)
    network.seconds(25 * 2**20)                        # of an all-reduce of 25 MiB
    dataclasses.replace(gpu, product_flops=500e12)     # what if products were slower

Two kinds of numbers live here. Figures are the vendor's; XLA compiles for a GPU that is described
by them (`target_config`). Rates are what programs are assumed to reach of them; the model in
`schedule` is as good as they are, so vary them before you believe it.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jddp.errors import ConfigError
from jddp.reduce.plan import MEBIBYTE


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
      bytes_per_second: To and from memory, in what computes little.
      kernel_seconds: Added by each kernel.
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


GPUS = {
    "h100_sxm": Gpu(
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
    )
}


def target_config(gpu: Gpu) -> str:
    """Describes a GPU as XLA asks for it: a `GpuTargetConfigProto`, as text.

    Of its fields these are the ones that a compile needs or by which the program changes, and the
    name.
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


@dataclass(frozen=True)
class Network:
    """How long an all-reduce takes that has the network to itself.

    Attributes:
      name: What it connects.
      times: Payload bytes, ascending, and seconds. Between two of them time follows a power
        of the bytes; below the first it stays, above the last bandwidth does.
      devices_per_host: Number of GPUs of each host; None if it is not known.
      slowness: Factor of all times.
    """

    name: str
    times: tuple[tuple[int, float], ...]
    devices_per_host: int | None = None
    slowness: float = 1.0

    def seconds(self, num_bytes: float) -> float:
        """The time of one all-reduce of `num_bytes` on each device."""
        sizes, times = zip(*self.times, strict=True)
        if num_bytes <= sizes[0]:
            return self.slowness * times[0]
        if num_bytes >= sizes[-1]:
            return self.slowness * times[-1] * num_bytes / sizes[-1]
        right = bisect.bisect(sizes, num_bytes)
        share = math.log(num_bytes / sizes[right - 1]) / math.log(sizes[right] / sizes[right - 1])
        return self.slowness * times[right - 1] * (times[right] / times[right - 1]) ** share

    def slower(self, factor: float) -> "Network":
        """The same network, taking `factor` times as long for everything."""
        name = f"{self.name}, {factor:g}x slower"
        return replace(self, name=name, slowness=factor * self.slowness)

    def among(self, devices: Sequence[int]) -> "Network":
        """The network among some of its devices, as many of each host, or of all for ()."""
        if not devices or self.devices_per_host is None:
            return self
        num_hosts = len({device // self.devices_per_host for device in devices})
        sizes = {"num_hosts": num_hosts, "devices_per_host": len(devices) // num_hosts}
        return replace(make_network(**sizes), slowness=self.slowness)


# Seconds of the smallest all-reduce and bus bandwidths (GB/s by MiB), as `nccl-tests` reports them.
# Within a host: eight H200, whose links are those of H100 (NVLink 4, NVSwitch).
# https://github.com/stas00/ml-engineering/blob/master/network/benchmarks/README.md
_WITHIN_SECONDS = 18e-6
_WITHIN = {1: 72, 4: 140, 8: 182, 16: 242, 32: 298, 64: 370, 128: 411, 256: 442, 1024: 464}
# Between hosts: two H100, one on each of two hosts, each with a network adapter of 400 Gb/s.
# https://github.com/NVIDIA/nccl/issues/1357. The smallest takes 47 us on two hosts in all.
# https://github.com/NVIDIA/nccl/issues/1244
_BETWEEN_SECONDS = 47e-6 - _WITHIN_SECONDS
_BETWEEN = {2: 18.5, 4: 27.2, 8: 36.2, 16: 39.9, 32: 41.3}


def make_network(*, num_hosts: int = 1, devices_per_host: int = 8) -> Network:
    """Returns the network between H100s: NVLink within a host, 400 Gb/s for each GPU between hosts.

    Over several hosts an all-reduce is taken to go in two parts, one after the other: within each
    host at the rate of one host, and between hosts, where each GPU reduces its share with its
    peers through its own adapter. NCCL overlaps the two, so that this is slower than it should be.

    Args:
      num_hosts: Hosts.
      devices_per_host: GPUs of each.

    Raises:
      ConfigError: If there are fewer than two devices.
    """
    if num_hosts < 1 or devices_per_host < 1 or num_hosts * devices_per_host < 2:
        raise ConfigError(
            f"A network connects two devices or more: got {num_hosts} hosts of {devices_per_host}."
        )
    name = f"{num_hosts} x {devices_per_host} GPUs"
    within = _ring(name, _WITHIN_SECONDS, _WITHIN, num_members=devices_per_host)
    if num_hosts == 1:
        return replace(within, devices_per_host=devices_per_host)
    between = _ring(name, _BETWEEN_SECONDS, _BETWEEN, num_members=num_hosts)
    times = {
        num_bytes: seconds + between.seconds(num_bytes / devices_per_host)
        for num_bytes, seconds in within.times
    }
    return Network(name, tuple(times.items()), devices_per_host)


def _ring(
    name: str, smallest_seconds: float, bandwidths: Mapping[int, float], *, num_members: int
) -> Network:
    """Times from bus bandwidths: what each member sends, 2 (n - 1) / n of the payload, by time."""
    sent = 2 * (num_members - 1) / num_members
    times = [(32 * 1024, smallest_seconds)]
    for mebibytes, gigabytes_per_second in bandwidths.items():
        num_bytes = mebibytes * MEBIBYTE
        seconds = num_bytes * sent / (gigabytes_per_second * 1e9)
        times.append((num_bytes, max(smallest_seconds, seconds)))
    return Network(name, tuple(times))
