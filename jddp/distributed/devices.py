"""The devices of a process: their number before JAX looks for any, and that there are some."""

import os

import jax

from jddp.errors import ConfigError, DeviceError

VIRTUAL_DEVICES = 8


def configure_devices(num_devices: int | str, *, num_processes: int = 1) -> None:
    """Sets the number of CPU devices, before JAX looks for any.

    Args:
      num_devices: Number of devices of all processes together. "auto" makes eight virtual CPU
        devices, which are used only where there is no accelerator, unless the environment gives a
        number; a number here wins over the environment.
      num_processes: Number of processes of the job.

    Raises:
      ConfigError: If the devices do not divide over the processes.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    is_set = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in flags
    if num_devices == "auto" and is_set:
        return
    in_all = VIRTUAL_DEVICES if num_devices == "auto" else int(num_devices)
    if in_all % num_processes and num_devices != "auto":
        raise ConfigError(
            f"mesh.num_devices={in_all} does not divide over {num_processes} processes. "
            f"Choose a multiple of {num_processes}."
        )
    # An option of JAX, not a flag of XLA: it is refused once the backend runs, where a flag would
    # be ignored.
    jax.config.update("jax_num_cpu_devices", max(1, in_all // num_processes))


def require_devices() -> None:
    """Starts the devices of this process; a job of several calls it after they have connected.

    Raises:
      DeviceError: If JAX finds none of the platform that it is to use.
    """
    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        wanted = os.environ.get("JAX_PLATFORMS")
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise DeviceError(
            f"JAX finds no device for JAX_PLATFORMS={wanted}: {reason}. Does nvidia-smi show it "
            "here, and is jax[cuda12] installed? JAX_PLATFORMS=cpu computes without one."
        ) from error
