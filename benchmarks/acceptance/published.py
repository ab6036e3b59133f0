"""Published bandwidths of all-reduces, by GPU and link.

    found = choose_figure("NVIDIA H200", link_of(topology()))

They are bus bandwidths as in nccl-tests, for messages of 256 MiB and more in one machine. The table
has no figure without a source.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from jddp.distributed import gpus

NVLINK, PCIE = "NVLink", "PCIe"
_ML = "https://github.com/stas00/ml-engineering/blob/master/network/benchmarks/README.md"
_NCCL, _TESTS = (
    "https://github.com/NVIDIA/nccl/issues",
    "https://github.com/NVIDIA/nccl-tests/issues",
)


class Published(NamedTuple):
    """A published bandwidth.

    Attributes:
      kind: Regular expression for the whole name of the GPU.
      link: "NVLink" or "PCIe".
      bandwidth: GB/s.
      machine: The machine that was measured.
      source: Address of the report.
    """

    kind: str
    link: str
    bandwidth: float
    machine: str
    source: str


FIGURES = (
    Published("NVIDIA B200", NVLINK, 839, "8 x B200", _ML),
    Published("NVIDIA H200", NVLINK, 442, "8 x H200, 256 MiB, NCCL 2.30", _ML),
    # Rings; NVLS gives up to 480 from some GiB on. By a maintainer of NCCL.
    Published("NVIDIA H100 80GB HBM3", NVLINK, 370, "8 x H100 SXM", f"{_TESTS}/212"),
    Published("NVIDIA H100 PCIe", NVLINK, 115, "2 x H100 PCIe with bridges", f"{_TESTS}/194"),
    Published("NVIDIA A100-SXM4-.*", NVLINK, 231, "8 x A100 SXM, 1 GiB", f"{_NCCL}/527"),
    # Pairs have bridges (NV12): 208 in a pair, 20 beyond it.
    Published("NVIDIA A100.*PCIe.*", NVLINK, 208, "2 x A100 with bridges", f"{_TESTS}/178"),
    Published("NVIDIA A100.*PCIe.*", PCIE, 20, "A100, several pairs with bridges", f"{_TESTS}/178"),
    Published("NVIDIA GeForce RTX 5090", PCIE, 28, "8 x RTX 5090", f"{_NCCL}/1639"),
)


def topology() -> list[str]:
    """The lines of `nvidia-smi topo -m`, which underlines the first."""
    return [re.sub(r"\x1b\[\d*m", "", line) for line in gpus.run_program("topo", "-m")]


def choose_figure(kind: str, link: str | None) -> Published | None:
    """The figure for a GPU and its link; None if none is published, or the link is unclear.

    Args:
      kind: Name of the GPU.
      link: Link between the GPUs; None if it is not known.
    """
    rows = [x for x in FIGURES if re.fullmatch(x.kind, kind, re.IGNORECASE)]
    rows = [x for x in rows if link in (None, x.link)]
    return rows[0] if len(rows) == 1 else None


def link_of(lines: Sequence[str]) -> str | None:
    """The slowest link between GPUs in the lines of `nvidia-smi topo -m`; None without any."""
    header = next((line for line in lines if re.match(r"\s+GPU0\b", line)), "")
    num = len(re.findall(r"\bGPU\d+\b", header))
    rows = [line.split()[1 : num + 1] for line in lines if re.match(r"GPU\d+\s", line)]
    links = {cell for row in rows for cell in row} - {"X"}
    if not links:
        return None
    return NVLINK if all(link.startswith("NV") for link in links) else PCIE
