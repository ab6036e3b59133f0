"""The report of NVIDIA's program `nvidia-smi` on the GPUs that this process may use.

Without the program, which a container may lack, the report is empty. The program takes about a
second, or several if a driver has to start first.
"""

import re
import subprocess
from typing import NamedTuple

_SECONDS = 60


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
      uuid: Unique name.
      kind: Name of the product.
      used_mib: Memory in use; None if it is not reported.
      total_mib: Memory in all; None if it is not reported.
    """

    uuid: str
    kind: str
    used_mib: int | None
    total_mib: int | None


class GpuProcess(NamedTuple):
    """A process that computes on a GPU; a container does not see processes outside of it.

    Attributes:
      gpu: UUID of the GPU.
      pid: Number of the process.
      name: Name of its program.
    """

    gpu: str
    pid: str
    name: str


class Listed(NamedTuple):
    """A GPU and the instances into which MIG divides it.

    Attributes:
      uuid: UUID of the GPU.
      instances: UUIDs of its MIG instances; empty without MIG.
    """

    uuid: str
    instances: tuple[str, ...] = ()


def list_devices() -> list[Listed]:
    """The GPUs with their MIG instances, in the order of their numbers."""
    found = list[Listed]()
    for line in run_program("-L"):
        uuid = re.search(r"\(UUID: ([^)]+)\)", line)
        if uuid is None:
            continue
        if line.startswith("GPU"):
            found.append(Listed(uuid[1]))
        elif found:
            found[-1] = Listed(found[-1].uuid, (*found[-1].instances, uuid[1]))
    return found


def list_gpus() -> list[Gpu]:
    """The GPUs, in the order of their numbers."""
    rows = _query("--query-gpu=uuid,name,memory.used,memory.total", 4)
    return [Gpu(uuid, kind, _number(used), _number(total)) for uuid, kind, used, total in rows]


def list_programs() -> list[GpuProcess]:
    """The processes that compute on the GPUs."""
    return [GpuProcess(*row) for row in _query("--query-compute-apps=gpu_uuid,pid,process_name", 3)]


def smallest_bytes() -> int | None:
    """Memory of the smallest GPU; None if it is not known."""
    known = [gpu.total_mib for gpu in list_gpus() if gpu.total_mib is not None]
    return min(known) * 2**20 if known else None


def run_program(*arguments: str) -> list[str]:
    """The lines that it prints; none if it is absent, fails or hangs."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return []
    return done.stdout.splitlines()


def _query(what: str, num_columns: int) -> list[list[str]]:
    rows = (line.split(", ") for line in run_program(what, "--format=csv,noheader,nounits"))
    return [row for row in rows if len(row) == num_columns]


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
