"""Checks the devices of JAX against the devices of the host."""

import os
import re
from collections.abc import Iterator, Mapping

import jax

from jddp.distributed.gpus import (
    FLAG,
    OLDEST_DRIVER,
    ON_PURPOSE,
    Missing,
    driver_version,
    lacks_atomics,
)
from jddp.doctor.finding import BAD, OK, WARN, Finding
from jddp.engine.mesh import kinds_of


def check_devices(missing: Missing | None = None) -> Iterator[Finding]:
    """Checks the devices of this process.

    Args:
      missing: The missing part, if CPUs are used although a GPU was to be expected.
    """
    here, everywhere = jax.local_devices(), jax.devices()
    kind = f"{here[0].platform} devices here ({here[0].device_kind})"
    yield Finding(OK, f"{len(here)} {kind}, {len(everywhere)} in all")
    if mixed := kinds_of(everywhere):
        what = f"The devices are {mixed}: each step waits for the slowest."
        yield Finding(WARN, what, "Choose with CUDA_VISIBLE_DEVICES, or exclude the host.")
    if missing is not None:
        yield Finding(BAD, f"JAX runs on CPUs. {missing.what}", f"{missing.fix} {ON_PURPOSE}")
    if here[0].platform == "gpu":
        runtime = str(here[0].client.platform_version)
        yield from check_driver(driver_version(), runtime)
        yield from check_atomics(runtime, os.environ)


def check_driver(version: int | None, runtime: str) -> Iterator[Finding]:
    """Whether the driver supports JAX's CUDA.

    Args:
      version: Version of the driver; None if it is not known.
      runtime: Runtime of JAX, such as "PJRT C API cuda 12090".
    """
    if version is None:
        return
    cuda = "".join(re.findall(r"cuda (\d{2})", runtime))
    oldest = OLDEST_DRIVER.get(cuda, 0)
    if version < oldest:  # with a package of forward compatibility
        what = f"The driver is {version}, but CUDA {cuda} needs {oldest}; JAX still finds GPUs."
        fix = "Install a newer driver, or jddp[cuda12], if kernels fail to load."
        yield Finding(WARN, what, fix)
    else:
        yield Finding(OK, f"NVIDIA driver {version}")


def check_atomics(runtime: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether this jaxlib compiles atomic adds for the GPUs.

    Args:
      runtime: Runtime of JAX, such as "PJRT C API cuda 12090".
      environ: Environment, with XLA_FLAGS.
    """
    if "cuda" in runtime and lacks_atomics(environ):
        what = "jaxlib 0.10.2 to 0.11.0 add gradients of embeddings up to 450 times slower."
        fix = (
            f"jddp.train sets XLA_FLAGS={FLAG}; set it for your own programs, or use a newer JAX, "
        )
        yield Finding(WARN, what, f"{fix}which needs Python 3.12.")
