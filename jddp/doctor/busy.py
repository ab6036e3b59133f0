"""Whether the GPUs of this host are free, before JAX takes their memory."""

from collections.abc import Iterator

from jddp.distributed.gpus import Gpu, list_gpus, list_programs
from jddp.doctor.finding import OK, WARN, Finding

_IDLE_MIB = 1024  # the most that a driver takes by itself


def check_busy() -> Iterator[Finding]:
    """Lists used memory and programs of each GPU that `nvidia-smi` reports as in use."""
    gpus, programs = list_gpus(), list_programs()
    is_busy = False
    for number, gpu in enumerate(gpus):
        names = [f"{name} ({pid})" for uuid, pid, name in programs if uuid == gpu.uuid]
        if names or (gpu.used_mib or 0) > _IDLE_MIB:
            is_busy = True
            by = ", ".join(names) or "programs that are not visible from here"
            what = f"GPU {number} ({gpu.kind}) is in use by {by}{_memory(gpu)}."
            fix = "Choose other GPUs with CUDA_VISIBLE_DEVICES, or let programs share a GPU with "
            yield Finding(WARN, what, f"{fix}XLA_PYTHON_CLIENT_PREALLOCATE=false.")
    if gpus and not is_busy:
        yield Finding(OK, f"{len(gpus)} GPUs, and no other program on them")


def _memory(gpu: Gpu) -> str:
    if gpu.used_mib is None or gpu.total_mib is None:
        return ""
    return f": {gpu.used_mib:,} of {gpu.total_mib:,} MiB"
