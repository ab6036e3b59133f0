"""What public documents say of GPUs, and the rates assumed.

    gpu = GPUS["h100_sxm"]
    dataclasses.replace(gpu, product_flops=500e12)     # what if products were slower

Two kinds of numbers live here. Figures are the vendor's; XLA compiles for a GPU that is described
by them (`target_config`). Rates are what programs are assumed to reach of them; the model in
`schedule` is as good as they are, so vary them before you believe it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jddp.reduce.plan import MEBIBYTE
from jddp.workbench.modelled.links import AMPERE, HOPPER, Link


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
    "a100_sxm": Gpu(
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
        # As above, column 8.0.
        compute_capability=(8, 0),
        threads_per_warp=32,
        block_dim_x=2**31 - 1,
        registers_per_block=64 * 1024,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=163 * 1024,
        # Assumed: the same shares of the peaks as above.
        product_flops=205e12,
        convolution_flops=142e12,
        bytes_per_second=1.64e12,
        kernel_seconds=2e-6,
        links=AMPERE,
    ),
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
