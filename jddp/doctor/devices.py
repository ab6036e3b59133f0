"""The devices of JAX, compared with those of the host."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

from jddp.doctor.finding import BAD, OK, WARN, Finding

# The oldest driver that each CUDA runs with: NVIDIA's table of minor version compatibility.
OLDEST_DRIVER = {"12": 525, "13": 580}


def check_devices(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Checks the devices of this process, which initializes them."""
    here, everywhere = jax.local_devices(), jax.devices()
    kind = f"{here[0].platform} devices here ({here[0].device_kind})"
    yield Finding(OK, f"{len(here)} {kind}, {len(everywhere)} in all")
    driver = Path("/proc/driver/nvidia/version")
    text = driver.read_text() if driver.exists() else ""
    gpus = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    yield from check_driver(text, here[0].platform, str(here[0].client.platform_version))
    yield from check_peers(gpus, len(here), here[0].platform, environ)


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
        yield Finding(
            BAD,
            f"There is an NVIDIA driver ({version}), and JAX runs on {platform}.",
            f"pip install 'jddp[cuda{newest}]', and JAX_PLATFORMS must not exclude GPUs.",
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
    """Whether a process cannot reach the GPUs of other processes on its host.

    Args:
      gpus: Device files that this process can see.
      num_seen: Number of local devices of JAX.
      platform: Platform of these devices.
      environ: Environment of a scheduler's task.
    """
    tasks = environ.get("SLURM_TASKS_PER_NODE", "1").partition("(")[0].partition(",")[0]
    is_many = tasks.isdecimal() and int(tasks) > 1
    if platform == "gpu" and is_many and len(gpus) == num_seen == 1:
        yield Finding(
            WARN,
            f"This task sees one GPU, and {tasks} tasks run on its host: GPUs that cannot see each "
            "other communicate through the host's memory.",
            "Ask for GPUs by node, --gpus-per-node, and not by task; each process takes its own.",
        )
