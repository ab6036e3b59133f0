"""The devices of JAX, compared with those of the host."""

import re
from collections.abc import Iterator
from pathlib import Path

import jax

from jddp.doctor.finding import BAD, OK, Finding

# The oldest driver that each CUDA runs with: NVIDIA's table of minor version compatibility.
OLDEST_DRIVER = {"12": 525, "13": 580}


def check_devices() -> Iterator[Finding]:
    """Checks the devices of this process, which initializes them."""
    here, everywhere = jax.local_devices(), jax.devices()
    kind = f"{here[0].platform} devices here ({here[0].device_kind})"
    yield Finding(OK, f"{len(here)} {kind}, {len(everywhere)} in all")
    driver = Path("/proc/driver/nvidia/version")
    text = driver.read_text() if driver.exists() else ""
    yield from check_driver(text, here[0].platform, str(here[0].client.platform_version))


def check_driver(text: str, platform: str, runtime: str) -> Iterator[Finding]:
    """Whether GPUs of the host are used, with a CUDA that their driver supports.

    Args:
      text: Version of the driver as the kernel reports it; empty where there is none.
      platform: Platform of JAX's devices.
      runtime: Runtime of JAX, such as "cuda 12090".
    """
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+)[.\d]*", text)
    if found is None:
        return
    version = int(found[1])
    if platform != "gpu":
        newest = max((x for x, oldest in OLDEST_DRIVER.items() if version >= oldest), default="12")
        what = f"There is an NVIDIA driver ({version}), and JAX runs on {platform}."
        fix = f"pip install 'jddp[cuda{newest}]', and JAX_PLATFORMS must not exclude GPUs."
        yield Finding(BAD, what, fix)
        return
    cuda = re.search(r"cuda (\d{2})", runtime)
    if cuda and version < OLDEST_DRIVER.get(cuda[1], 0):
        what = f"The driver is {version}, and CUDA {cuda[1]} needs {OLDEST_DRIVER[cuda[1]]}."
        yield Finding(BAD, what, "A newer driver, or jddp[cuda12].")
    else:
        yield Finding(OK, f"NVIDIA driver {version}")
