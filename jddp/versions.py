"""Versions of Python and of the packages that results depend on."""

import importlib.metadata
import platform

PACKAGES = ("jddp", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
    """Returns the version of each by name."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "checkout"  # Run in place, not installed.
