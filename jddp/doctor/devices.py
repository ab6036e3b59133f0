"""The devices of JAX, compared with those of the host."""

import re
from collections.abc import Iterator

import jax

from jddp.distributed.gpus import OLDEST_DRIVER, ON_PURPOSE, Missing, driver_version
from jddp.doctor.finding import BAD, OK, WARN, Finding


def check_devices(missing: Missing | None = None) -> Iterator[Finding]:
    """Checks the devices of this process.

    Args:
      missing: What is missing, where CPUs are used and a GPU was to be expected.
    """
    here, everywhere = jax.local_devices(), jax.devices()
    kind = f"{here[0].platform} devices here ({here[0].device_kind})"
    yield Finding(OK, f"{len(here)} {kind}, {len(everywhere)} in all")
    if missing is not None:
        yield Finding(BAD, f"JAX runs on CPUs. {missing.what}", f"{missing.fix} {ON_PURPOSE}")
    if here[0].platform == "gpu":
        yield from check_driver(driver_version(), str(here[0].client.platform_version))


def check_driver(version: int | None, runtime: str) -> Iterator[Finding]:
    """Whether the driver supports the CUDA of JAX, which uses the GPUs.

    Args:
      version: Version of the driver; None where it is not known.
      runtime: Runtime of JAX, such as "cuda 12090".
    """
    if version is None:
        return
    cuda = re.search(r"cuda (\d{2})", runtime)
    oldest = OLDEST_DRIVER.get(cuda[1], 0) if cuda else 0
    if version < oldest:  # with a package of forward compatibility
        what = f"The driver is {version}, and CUDA {runtime[5:7]} needs {oldest}; JAX has GPUs."
        yield Finding(WARN, what, "A newer driver, or jddp[cuda12], if kernels fail to load.")
    else:
        yield Finding(OK, f"NVIDIA driver {version}")
