"""Joins the processes of a job, and compares their configs, versions and options of JAX."""

import contextlib
import os

import jax

from jddp.config.files import flatten
from jddp.config.schema import Config
from jddp.config.versions import source_hash, versions
from jddp.distributed.agree import agree, refuse_gpus
from jddp.distributed.coordination import process_index
from jddp.distributed.gpus import ON_PURPOSE, Missing, gpu_facts, small_shared_memory
from jddp.distributed.join import configure_devices, initialize, require_devices
from jddp.distributed.schedulers import resolve_identity
from jddp.errors import report

# Options of JAX that change the results of a program.
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")


def join(config: Config, num_devices: int | str) -> None:
    """Joins the processes of a job, compares their configs, and starts their devices.

    Args:
      config: Config of the job.
      num_devices: Number of devices of all processes, or "auto".

    Raises:
      ConfigError: If processes share a GPU, or one is not there.
      DeviceError: If JAX finds no device.
      ProcessMismatchError: If processes have different configs or versions.
    """
    identity = resolve_identity()
    # A running JAX, as in a notebook, refuses: then the mesh takes some of its devices.
    with contextlib.suppress(RuntimeError):
        configure_devices(num_devices, num_processes=identity.num_processes)
    initialize(identity)
    agree("config or version", _facts(config))
    refuse_gpus(identity)
    missing = require_devices()
    if process_index() == 0:
        _report_lacks(missing)


def _report_lacks(missing: Missing | None) -> None:
    """Reports a missing GPU, or too little shared memory for GPUs to communicate through."""
    if missing is not None:
        report(f"JAX runs on CPUs. {missing} {ON_PURPOSE}")
    elif jax.default_backend() == "gpu" and jax.device_count() > 1:
        small = small_shared_memory(jax.local_device_count())
        if small is not None:
            report(str(small))


def _facts(config: Config) -> dict[str, str]:
    """Values that all processes of a job must share; the folder of the data may differ."""
    keys = {key: str(x) for key, x in flatten(config.model_dump()).items() if key != "data.dir"}
    settings = {name: str(getattr(jax.config, name)) for name in SETTINGS}
    flags = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "JAX_PLATFORMS")}
    flags["code of jddp"] = source_hash()
    return {**gpu_facts(os.environ), **keys, **versions(), **settings, **flags}
