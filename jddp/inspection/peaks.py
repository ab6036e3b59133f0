"""Peak rates of GPUs, as their makers publish them: the denominators of MFU.

    seconds_at_peak({"bfloat16": 4e12}, "NVIDIA H100 80GB HBM3")

Rates are dense: where a document has only the rate with sparsity, it is half of it. They are those
of products that are summed in float32. This module imports no JAX.
"""

from collections.abc import Mapping

TF32 = "tf32"  # float32 products, whose factors hardware may round to 11 bits
KINDS = ("bfloat16", "float16", TF32, "float32")

# Dense TFLOP/s of these kinds, by what a device calls itself; 0 for a kind that it lacks. A V100
# and a T4 do not round float32. Comments have the documents' figures for 16 bits, TF32 and float32;
# "sparse" marks those with sparsity. They were found again, 2026-11-25 and 26, in copies of these
# documents or in tables of others; those of the GH200 were not.
PEAKS = {
    # 125, none, 15.7. "NVIDIA V100 Tensor Core GPU", data sheet, January 2020, column SXM2.
    # https://www.nvidia.com/en-us/data-center/v100/
    "Tesla V100-SXM2-16GB": (0, 125, 15.7, 15.7),
    "Tesla V100-SXM2-32GB": (0, 125, 15.7, 15.7),
    # 65, none, 8.1. "NVIDIA T4 Tensor Core GPU", data sheet 951643.
    # https://www.nvidia.com/en-us/data-center/tesla-t4/
    "Tesla T4": (0, 65, 8.1, 8.1),
    # 312, 156, 19.5. "NVIDIA A100 Tensor Core GPU", data sheet 1758950, r4.
    # https://www.nvidia.com/a100
    "NVIDIA A100-SXM4-40GB": (312, 312, 156, 19.5),
    "NVIDIA A100-SXM4-80GB": (312, 312, 156, 19.5),
    "NVIDIA A100-PCIE-40GB": (312, 312, 156, 19.5),
    "NVIDIA A100 80GB PCIe": (312, 312, 156, 19.5),
    # SXM 1,979 sparse, 989 sparse, 67; NVL 1,671 sparse, 835 sparse, 60; the PCIe card had 1,513
    # sparse, 756 sparse, 51.
    # https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
    "NVIDIA H100 80GB HBM3": (989, 989, 494, 67),
    "NVIDIA H100 NVL": (835, 835, 417, 60),
    "NVIDIA H100 PCIe": (756, 756, 378, 51),
    # As the H100: SXM 1,979 sparse, 989 sparse, 67; NVL 1,671 sparse, 835 sparse, 60.
    # https://www.nvidia.com/en-us/data-center/h200/
    "NVIDIA H200": (989, 989, 494, 67),
    "NVIDIA H200 NVL": (835, 835, 417, 60),
    # 1,979 sparse, 989 sparse, 67. https://www.nvidia.com/en-us/data-center/grace-hopper-superchip/
    "NVIDIA GH200 480GB": (989, 989, 494, 67),
    "NVIDIA GH200 144G HBM3e": (989, 989, 494, 67),
    # A GPU of an HGX B200: 4,500 sparse, 2,200 sparse, 75. "NVIDIA Blackwell", data sheet, and
    # https://www.nvidia.com/en-us/data-center/hgx/
    "NVIDIA B200": (2250, 2250, 1100, 75),
    # 242 sparse, 120 sparse, 30.3. https://www.nvidia.com/en-us/data-center/l4/
    "NVIDIA L4": (121, 121, 60, 30.3),
    # 362.05 and 733 sparse, half of which is 366: the lower one; 183, 91.6.
    # https://www.nvidia.com/en-us/data-center/l40s/
    "NVIDIA L40S": (362, 362, 183, 91.6),
    # 71, 35.6, 35.6; 154.8, 77.4, 38.7. Tables 2 and 3.
    # https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf
    "NVIDIA GeForce RTX 3090": (71, 71, 35.6, 35.6),
    "NVIDIA RTX A6000": (154.8, 154.8, 77.4, 38.7),
    # 165.2, 82.6, 82.6. Table 2 and appendix; the RTX 6000 has 1,457 in fp8
    # sparse, and 91.1 in float32.
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
    "NVIDIA GeForce RTX 4090": (165.2, 165.2, 82.6, 82.6),
    "NVIDIA RTX 6000 Ada Generation": (364.2, 364.2, 182.1, 91.1),
    # 209.5, 104.8, 104.8. Table 3, at https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/
    # nvidia-rtx-blackwell-gpu-architecture.pdf
    "NVIDIA GeForce RTX 5090": (209.5, 209.5, 104.8, 104.8),
}


def seconds_at_peak(flops: Mapping[str, float], device: str) -> float | None:
    """The time that operations take one device at its peak rates; None if one is not known.

    Args:
      flops: Operations by kind, as `jddp.inspection.flops` counts them.
      device: What the device calls itself, `device_kind` of a `jax.Device`.
    """
    rates = dict(zip(KINDS, PEAKS.get(device, ()), strict=False))
    if not all(rates.get(kind) for kind in flops):
        return None
    return sum(number / (rates[kind] * 1e12) for kind, number in flops.items())
