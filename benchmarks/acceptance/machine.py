"""The devices of the machine, and the report of `nvidia-smi` on them."""

import os
from collections.abc import Iterator, Sequence

import jax

from acceptance.published import topology
from acceptance.result import Machine, PartResult, worst
from jddp.distributed.gpus import INSTALL, may_use_gpus, run_program, why_missing
from jddp.distributed.join import require_devices
from jddp.ground.errors import DeviceError
from jddp.inspection.doctor import check_devices
from jddp.inspection.memory import in_words

# Fields of nvidia-smi --query-gpu that are the same in all drivers, and their names on the page.
FIELDS = {
    "name": "GPU",
    "driver_version": "driver",
    "memory.total": "memory",
    "power.limit": "power limit",
    "clocks.max.sm": "highest clock of the SMs",
    "clocks.max.memory": "highest clock of the memory",
    "ecc.mode.current": "ECC",
    "mig.mode.current": "MIG",
    "compute_mode": "compute mode",
    "pcie.link.gen.max": "PCIe generation",
    "pcie.link.width.max": "PCIe lanes",
}


def find_devices(machine: Machine) -> PartResult:
    """Starts the devices, and describes the machine.

    Raises:
      DeviceError: If the platform has no device.
    """
    # Before this process uses the GPUs.
    query = "--query-compute-apps=gpu_uuid,pid,process_name"
    programs = run_program(query, "--format=csv,noheader")
    missing = require_devices()
    devices = jax.devices()
    if devices[0].platform != machine.platform:
        raise DeviceError(
            f"--gpu-acceptance finds no GPU. {missing or _why_none()} --platform cpu tries the "
            "procedure without one."
        )
    findings = [*check_devices()]
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    details = [str(finding) for finding in findings]
    details += [f"        JAX may use {in_words(limit)} of each"] if limit else []
    details += [
        "",
        *digest(run_program(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader")),
    ]
    details += [line for line in run_program("-q") if line.startswith("CUDA Version")]
    details += ["", *(f"in use by {program}" for program in programs), *topology()]
    text = "\n".join(details).rstrip()
    facts = {"num_devices": len(devices), "kind": devices[0].device_kind}
    return PartResult(*worst(*findings), details=f"```text\n{text}\n```", facts=facts)


def _why_none() -> str:
    if not may_use_gpus(os.environ.get("JAX_PLATFORMS")):
        return f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} excludes them."
    return str(why_missing() or f"There is neither a driver nor a JAX plugin for GPUs. {INSTALL}")


def digest(lines: Sequence[str]) -> Iterator[str]:
    """The fields of each GPU; GPUs with equal fields are listed together."""
    alike: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        alike.setdefault(line, []).append(number)
    for line, numbers in alike.items():
        yield f"nvidia-smi, GPU {', '.join(map(str, numbers))}"
        for name, value in zip(FIELDS.values(), line.split(", "), strict=False):
            yield f"  {name:<28}{value}"
