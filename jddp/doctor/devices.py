"""What JAX has found, beside what the host has."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

from jddp.doctor.finding import BAD, OK, WARN, Finding

# The oldest driver that each CUDA runs with: NVIDIA's table of minor version compatibility.
OLDEST_DRIVER = {"12": 525, "13": 580}


def check_devices(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Looks at the devices of this process; wakes them."""
    here, everywhere = jax.local_devices(), jax.devices()
    kind = f"{here[0].platform} devices here ({here[0].device_kind})"
    yield Finding(OK, f"{len(here)} {kind}, {len(everywhere)} in all")
    driver = Path("/proc/driver/nvidia/version")
    told = driver.read_text() if driver.exists() else ""
    gpus = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    yield from check_driver(told, here[0].platform, str(here[0].client.platform_version))
    yield from check_peers(gpus, len(here), here[0].platform, environ)


def check_driver(told: str, platform: str, runtime: str) -> Iterator[Finding]:
    """Whether GPUs that are there are used, by a CUDA that their driver knows.

    Args:
      told: What the kernel says of the driver; empty where there is none.
      platform: Of JAX's devices.
      runtime: What JAX says it runs on, such as "cuda 12090".
    """
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+)[.\d]*", told)
    if found is None:
        return
    version = int(found[1])
    if platform != "gpu":
        newest = max(cuda for cuda, oldest in OLDEST_DRIVER.items() if version >= oldest)
        yield Finding(
            BAD,
            f"There is an NVIDIA driver ({version}), and JAX runs on {platform}.",
            f"pip install 'jddp[cuda{newest}]'; and JAX_PLATFORMS must not say otherwise.",
        )
        return
    cuda = re.search(r"cuda (\d{2})", runtime)
    if cuda and version < OLDEST_DRIVER.get(cuda[1], 0):
        yield Finding(
            BAD,
            f"The driver is {version}, and CUDA {cuda[1]} needs {OLDEST_DRIVER[cuda[1]]}.",
            "A newer driver, or jddp[cuda12].",
        )
    else:
        yield Finding(OK, f"NVIDIA driver {version}")


def check_peers(
    gpus: Sequence[str], num_seen: int, platform: str, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Whether a process is cut off from the GPUs that its neighbours use.

    Args:
      gpus: Device files that this process can see.
      num_seen: Devices that JAX has here.
      platform: Theirs.
      environ: Of a scheduler's task.
    """
    tasks = environ.get("SLURM_TASKS_PER_NODE", "1").partition("(")[0].partition(",")[0]
    is_many = tasks.isdecimal() and int(tasks) > 1
    if platform == "gpu" and is_many and len(gpus) == num_seen == 1:
        yield Finding(
            WARN,
            f"This task sees one GPU, and {tasks} tasks run on its host: cut off from each other, "
            "GPUs talk through the host's memory.",
            "Ask for GPUs by node, --gpus-per-node, and not by task; each process takes its own.",
        )
