"""Versions of Python, of the packages that results depend on, and of the code around a run."""

import contextlib
import functools
import hashlib
import importlib.metadata
import platform
from pathlib import Path

PACKAGES = ("jddp", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
DECODERS = ("pillow", "simplejpeg")  # another version may round pixels differently


def versions() -> dict[str, str]:
    """Returns the version of each package by name, and the versions of installed decoders."""
    found = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    for name in DECODERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "checkout"  # Run in place, not installed.


def commit_of(folder: Path) -> str:
    """The commit of git's checkout that a folder is in; "" where there is none.

    Files are read, and git is not run. Whether files have changed since is not known.
    """
    with contextlib.suppress(OSError, ValueError):  # a folder that was removed, or other files
        here = folder.absolute()
        found = (x / ".git" for x in (here, *here.parents) if (x / ".git").exists())
        return _commit_in(next(found, here))
    return ""


def _commit_in(git: Path) -> str:
    if git.is_file():  # of a worktree or a submodule
        git = git.parent / git.read_text().removeprefix("gitdir: ").strip()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    common = git / "commondir"
    git = git / common.read_text().strip() if common.exists() else git
    if (git / name).exists():
        return (git / name).read_text().strip()
    lines = (git / "packed-refs").read_text().splitlines()
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), "")


@functools.cache  # of the code as it was first asked for, which is nearest to the code that runs
def source_hash() -> str:
    """The sha256 of all code of jddp, as it runs here."""
    package = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return found.hexdigest()
