"""Checks that the GPUs of each process of a job exist, are its own, and that NCCL connects them.

    refuse_gpus(identity)      # every process calls it, before devices start

CUDA silently leaves out GPUs that do not exist. NCCL connects neither MIG instances nor two
processes on one GPU, and reports this only minutes later. Numbers are compared as UUIDs, because
each task of a scheduler may count its GPUs from 0. Without `nvidia-smi` only UUIDs are known.
"""

import json
import os
from collections.abc import Mapping, Sequence

from jddp.distributed.coordination import gather, num_processes
from jddp.distributed.gpus import may_use_gpus, num_nvidia, plugins
from jddp.distributed.identity import CUDA, Identity, shown
from jddp.distributed.nvidia_smi import Listed, list_devices
from jddp.errors import ConfigError

_SECONDS = 120.0


def refuse_gpus(identity: Identity, environ: Mapping[str, str] = os.environ) -> None:
    """Refuses GPUs that do not exist, MIG instances in a job, and GPUs that two processes share.

    Raises:
      ConfigError: On every process, if any has such a GPU.
    """
    uses_cuda = any(name.startswith("cuda") for name in plugins())
    is_open = num_processes() > 1 or CUDA in environ
    own = list[str]()
    mistake = ""
    if uses_cuda and is_open and num_nvidia() and may_use_gpus(environ.get("JAX_PLATFORMS")):
        try:
            own = choose(environ, identity.local_device_ids, list_devices())
        except ConfigError as error:
            mistake = str(error)
    texts = gather("gpus", json.dumps([own, mistake]), timeout_seconds=_SECONDS)
    check(list(map(json.loads, texts)))


def choose(
    environ: Mapping[str, str], local_ids: Sequence[int] | None, listed: Sequence[Listed]
) -> list[str]:
    """UUIDs of the GPUs, or of the MIG instance, that a process has.

    Args:
      environ: Environment, with CUDA_VISIBLE_DEVICES.
      local_ids: Numbers of its GPUs among the visible ones; None for all.
      listed: The GPUs of the host; empty if they are not known.

    Raises:
      ConfigError: If one does not exist.
    """
    text = environ.get(CUDA)
    if not listed and any(name.isdecimal() for name in _names(text or "")):
        return []
    if text is None:
        visible = [_first_of(gpu) for gpu in listed]
        instances = [uuid for uuid in visible if _is_mig(uuid)]
        visible = instances[:1] or visible  # CUDA shows a process one instance
    else:
        visible = [_find(name, text, listed) for name in _names(text)]
        if len(visible) > 1 and any(map(_is_mig, visible)):
            raise ConfigError(
                f"{CUDA}={shown(text)}: CUDA shows a process only its first MIG instance. Name one."
            )
    if local_ids is None or not visible:
        return visible
    if max(local_ids) >= len(visible):
        raise ConfigError(
            f"local device {max(local_ids)} does not exist: this process sees {len(visible)} GPUs. "
            "Start no more processes than there are devices."
        )
    return [visible[i] for i in local_ids]


def check(of_processes: Sequence[tuple[list[str], str]]) -> None:
    """Checks the GPUs of all processes.

    Args:
      of_processes: UUIDs of each process, and its mistake, if there is one.

    Raises:
      ConfigError: If there is a mistake, or NCCL would not connect them.
    """
    owners = dict[str, int]()
    is_job = len(of_processes) > 1
    for process, (own, mistake) in enumerate(of_processes):
        if mistake:
            raise ConfigError(f"process {process}: {mistake}" if is_job else mistake)
        for uuid in own if is_job else ():
            if _is_mig(uuid):
                raise ConfigError(
                    f"process {process} has the MIG instance {uuid}, and NCCL connects none: "
                    "train with one process for each alone, or turn MIG off (nvidia-smi -mig 0)."
                )
            if (other := owners.setdefault(uuid, process)) != process:
                raise ConfigError(
                    f"processes {other} and {process} have the same GPU, {uuid}, and NCCL cannot "
                    "connect them: start one process for each GPU, or one for all GPUs, and leave "
                    f"{CUDA} to the launcher."
                )


def _names(text: str) -> list[str]:
    """The names in a list, up to the first that hides the others."""
    names = [name.strip() for name in text.split(",")]
    hidden = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    return names[:hidden]


def _find(name: str, text: str, listed: Sequence[Listed]) -> str:
    """The UUID of a GPU or instance, by its number or the beginning of its UUID."""
    if not listed:
        return name
    if name.isdecimal() and int(name) < len(listed):
        return _first_of(listed[int(name)])
    for gpu in listed:
        if name.startswith("GPU-") and gpu.uuid.startswith(name):
            return _first_of(gpu)
        if _is_mig(name) and (gpu.uuid in name or name in gpu.instances):
            return name
    raise ConfigError(
        f"{CUDA}={shown(text)}: {name[:60]} is none of the {len(listed)} GPUs that nvidia-smi -L "
        "lists here. Unset the variable if it was set for another host."
    )


def _first_of(gpu: Listed) -> str:
    return next(iter(gpu.instances), gpu.uuid)


def _is_mig(uuid: str) -> bool:
    return uuid.startswith("MIG-")
