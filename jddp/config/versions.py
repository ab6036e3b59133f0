"""Versions of Python, of the packages that results depend on, and of the code around a run."""

import contextlib
import functools
import hashlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path

PACKAGES = ("jddp", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
DECODERS = ("pillow", "simplejpeg")  # another version may round pixels differently


def versions() -> dict[str, str]:
    """Returns the version of each package by name, and the versions of installed decoders."""
    # jddp may run in place, without having been installed.
    found = {"python": platform.python_version(), "jddp": "checkout"}
    for name in (*PACKAGES, *DECODERS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit_of(folder: Path) -> str:
    """The commit of git's checkout that a folder is in; "" where there is none, or no git."""
    command = ["git", "-C", str(folder), "rev-parse", "--verify", "--quiet", "HEAD"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""


@functools.cache  # The code at the first call is nearest to the code that runs.
def source_hash() -> str:
    """The sha256 of all code of jddp, as it runs here."""
    package = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return found.hexdigest()
