"""The GPUs of this host as files, drivers and packages show them, before JAX looks for any.

    gpu_facts(os.environ)             # facts that must be equal in all processes of a job
    why_missing()                     # the missing part, and the way out, if JAX has no GPU
    smallest_bytes()                  # the memory of the smallest GPU, as `nvidia-smi` reports it
    add_flag(os.environ)              # allows atomic adds, before JAX is started

If its plugin for GPUs fails, JAX computes on CPUs. If one process of a job has no GPU and others
have one, the others wait for it in the first exchange of their devices.

Without the program `nvidia-smi`, which a container may lack, its reports are empty. It takes about
a second, or several if a driver has to start first.
"""

import re
import subprocess
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
# The oldest driver that each CUDA runs with: NVIDIA's table of minor version compatibility.
OLDEST_DRIVER = {"12": 525, "13": 580}
PLATFORMS = {"cuda", "gpu", "rocm"}  # Values of JAX_PLATFORMS.
ON_PURPOSE = "Set JAX_PLATFORMS=cpu if you want CPUs."
INSTALL = (
    "pip install 'jddp[cuda12]'; cuda13 needs driver 580 or newer, and GPUs newer than V100 and "
    "P100."
)
_CONTAINER = (
    "A container needs --gpus all (Docker), --device nvidia.com/gpu=all (Podman) or the limit "
    "nvidia.com/gpu (Kubernetes)."
)
# jaxlib 0.10.2 to 0.11.0 compile a scatter that adds float32, such as the gradient of an embedding,
# to loops of compare-and-swap, up to 450 times slower where rows collide. LLVM has an option for
# atomics: github.com/openxla/xla/issues/46225, github.com/jax-ml/jax/issues/38806.
_NAME = "xla_backend_extra_options"
FLAG = f"--{_NAME}=-nvptx-allow-ftz-atomics"
_FIRST_SLOW, _LAST_SLOW = (0, 10, 2), (0, 11, 0)
OF_TPUS = "Is libtpu installed (jddp[tpu]), and does another program use the TPUs?"
_SECONDS = 60  # Limit for nvidia-smi.


class Missing(NamedTuple):
    """The reason why JAX has no GPU.

    Attributes:
      what: Description of the missing part.
      fix: Way out.
    """

    what: str
    fix: str

    def __str__(self) -> str:
        """Both, in one line."""
        return f"{self.what} {self.fix}"


def num_nvidia() -> int:
    """Number of NVIDIA GPUs of this host or container."""
    return len([*ROOT.glob("dev/nvidia[0-9]*")])


def has_tpu(environ: Mapping[str, str]) -> bool:
    """Whether there is a TPU here, or GKE gives this process one."""
    return "TPU_WORKER_ID" in environ or bool([*ROOT.glob("dev/accel[0-9]*")])


def driver_version() -> int | None:
    """Version of NVIDIA's driver as the kernel reports it, also in a container without GPUs."""
    path = ROOT / "proc/driver/nvidia/version"
    text = path.read_text() if path.exists() else ""
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+)[.\d]*", text)
    return int(found[1]) if found else None


def plugins() -> list[str]:
    """JAX's plugins for GPUs that are installed, such as cuda12."""
    from importlib.metadata import entry_points  # Its import takes longer than this module.

    names = sorted(entry.name for entry in entry_points(group="jax_plugins"))
    return [name[4:] for name in names if re.fullmatch(r"xla_(cuda|rocm)\d+", name)]


def may_use_gpus(platforms: str | None) -> bool:
    """Whether JAX_PLATFORMS permits GPUs."""
    return not platforms or not PLATFORMS.isdisjoint(platforms.split(","))


def has_gpu(environ: Mapping[str, str]) -> bool:
    """Whether there is a GPU here, and JAX_PLATFORMS permits it."""
    return may_use_gpus(environ.get("JAX_PLATFORMS")) and num_nvidia() > 0


def gpu_facts(environ: Mapping[str, str]) -> dict[str, str]:
    """Facts that must be equal on all processes: a process without a GPU would use its CPU."""
    return {"a GPU": "present" if has_gpu(environ) else "absent"}


def why_missing() -> Missing | None:
    """The reason why JAX has no GPU; None if neither a plugin nor a driver suggests a GPU."""
    driver = driver_version()
    installed = plugins()
    cuda = next((name[4:] for name in installed if name.startswith("cuda")), "")
    if driver is None:
        fix = "Install the driver; or uninstall the plugin if there is no GPU."
        fix += f" {_CONTAINER}" if cuda else ""
        what = f"JAX's plugin {', '.join(installed)} is installed, but no driver for it."
        return Missing(what, fix) if installed else None
    if not num_nvidia():
        return Missing(f"NVIDIA's driver is {driver}, but there is no /dev/nvidia*.", _CONTAINER)
    if not cuda:
        what = f"NVIDIA's driver is {driver}, but JAX has no plugin for it."
        return Missing(what, INSTALL)
    if driver < (oldest := OLDEST_DRIVER.get(cuda, 0)):
        what = f"NVIDIA's driver is {driver}, but CUDA {cuda} needs {oldest}."
        older = ", or jddp[cuda12]" if driver >= OLDEST_DRIVER["12"] else ""
        return Missing(what, f"Install a newer driver{older}.")
    what = f"NVIDIA's driver is {driver}, but JAX's plugin cuda{cuda} finds no GPU."
    return Missing(what, "LD_LIBRARY_PATH must name no CUDA or cuDNN but pip's.")


def smallest_bytes() -> int | None:
    """Memory of the smallest GPU; None if it is not known."""
    lines = run_program("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    return min((int(line) * 2**20 for line in lines if line.isdecimal()), default=None)


def run_program(*arguments: str) -> list[str]:
    """The lines that `nvidia-smi` prints; none if it is absent, fails or hangs."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return []
    return done.stdout.splitlines()


def lacks_atomics(environ: Mapping[str, str]) -> bool:
    """Whether JAX will compile slow loops: by its version, unless the user has set the flag."""
    from importlib.metadata import version  # Its import takes longer than this module.

    numbers = tuple(map(int, re.findall(r"\d+", version("jaxlib"))[:3]))
    return _FIRST_SLOW <= numbers <= _LAST_SLOW and _NAME not in environ.get("XLA_FLAGS", "")


def add_flag(environ: MutableMapping[str, str]) -> None:
    """Adds the flag where there are GPUs that need it, before JAX is started."""
    if num_nvidia() and may_use_gpus(environ.get("JAX_PLATFORMS")) and lacks_atomics(environ):
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {FLAG}".lstrip()
