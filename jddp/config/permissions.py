"""Ownership and permissions of directories, and paths that begin with a home directory.

Files in the directory of another user are not trusted.
"""

import os
import re
from pathlib import Path

from jddp.ground.errors import ConfigError, FileSystemError, file_errors


def is_url(path: str | Path) -> bool:
    """Whether it is a URL, such as `s3://bucket/run`."""
    return re.match(r"[A-Za-z][\w+.-]+://", str(path)) is not None


def folder_or_url(path: str | Path, *, folder: Path | None = None) -> str | Path:
    """Like `absolute`, but returns URLs unchanged.

    Raises:
      ConfigError: If it is empty, the home directory is not known, or a `Path` was made of a URL.
    """
    if not str(path):
        raise ConfigError("run_dir='' names no folder. Give one, or None to keep nothing.")
    return path if is_url(path) else absolute(path, folder=folder)


def absolute(path: str | Path, *, folder: Path | None = None) -> Path:
    """As `expand`, for a path that is used later: a program may change its working directory.

    Args:
      path: The path.
      folder: Folder that a relative path belongs to; by default the working directory.

    Raises:
      ConfigError: As `expand`.
    """
    return (folder or Path.cwd()) / expand(path)


def expand(path: str | Path) -> Path:
    """Replaces `~` or `~user` at the beginning of a path, as a shell does.

    Raises:
      ConfigError: If it is a URL, which would become the name of a folder, or the home directory
        is not known.
    """
    if re.match(r"[A-Za-z][\w+.-]+:/", str(path)):  # a Path keeps one of the slashes
        raise ConfigError(
            f"{str(path)!r} is a URL, and only a run directory may be one, as a string with '://'. "
            "Mount the storage and give its folder here, such as /mnt/storage/run."
        )
    try:
        return Path(path).expanduser() if str(path).startswith("~") else Path(path)
    except RuntimeError:
        raise ConfigError(
            f"{str(path)!r} names a home directory that is not known here. Set HOME or write the "
            "whole path, which is ./~name where a name begins with ~."
        ) from None


def refuse_foreign(directory: Path, called: str) -> None:
    """Refuses an existing directory that belongs to another user.

    Args:
      directory: Directory whose owner is checked.
      called: Name of the directory in the error.

    Raises:
      FileSystemError: If it belongs to another user.
    """
    if not hasattr(os, "geteuid") or not directory.exists():
        return
    owner = directory.stat().st_uid
    if owner != os.geteuid():
        raise FileSystemError(
            f"{called} {directory} belongs to user {owner}, and this is user {os.geteuid()}. "
            "Choose a directory of your own, or take this one over with chown."
        )


def private_cache(name: str, called: str) -> Path:
    """Makes a folder of jddp's own in the user's cache, which is below XDG_CACHE_HOME or ~/.cache.

    Raises:
      FileSystemError: If others can write it, or it cannot be made.
      ConfigError: If the home directory is not known.
    """
    directory = expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jddp" / name
    with file_errors(f"{called} {directory}"):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_foreign(directory, called)
        if directory.stat().st_mode & 0o022:
            raise FileSystemError(
                f"{called} {directory} can be written by others. Remove it, or choose another."
            )
        directory.chmod(0o700)
    return directory
