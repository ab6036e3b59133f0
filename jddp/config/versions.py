"""Versions of Python and of the packages that results depend on."""

import hashlib
import importlib.metadata
import platform
from pathlib import Path

PACKAGES = ("jddp", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
    """Returns the version of each by name."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "checkout"  # Run in place, not installed.


def source_hash() -> str:
    """The sha256 of all code of jddp, as it runs here."""
    package = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return found.hexdigest()
