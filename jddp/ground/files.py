"""Paths, files and folders: of this user, replaced atomically, never in another folder.

    folder = SameFolder(run_dir)
    folder.pin()                                # the folder that is there now stays
    with folder.open("metrics.jsonl", "ab") as file: # an OSError if it is another folder by now
        ...

A run writes for days into a folder that it knows by its path. If that folder is moved away, and a
link or the folder of another run takes its place, nothing may be written there.

Files in the directory of another user are not trusted.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from jddp.ground.errors import ConfigError, FileSystemError, file_errors

# Permissions that other users never have on the files and folders of a run, whatever the umask.
WRITE_BY_OTHERS = 0o022


class SameFolder:
    """The folder at a path; a link is followed.

    Args:
      path: Path of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._first: os.stat_result | None = None

    def pin(self) -> None:
        """Takes the folder that is there at the first call; later calls change nothing.

        Raises:
          OSError: If there is no folder.
        """
        self._first = self._first or os.stat(self.path)

    def check(self) -> None:
        """Compares the folder with the pinned folder, if there is one.

        Raises:
          OSError: If the path leads to another folder, or to none.
        """
        self._compare(os.stat(self.path))

    def open(self, name: str, mode: str) -> IO[Any]:
        """Opens a file of the folder, unbuffered; a link in its place is not followed.

        Raises:
          OSError: If it cannot be opened, or the path leads to another folder.
        """

        def open_here(name: str, flags: int) -> int:
            return os.open(name, flags | os.O_NOFOLLOW, 0o666 & ~WRITE_BY_OTHERS, dir_fd=folder)

        with self._opened() as folder:
            return open(name, mode, buffering=0, opener=open_here)

    def replace(self, name: str, content: Iterable[bytes]) -> None:
        """Replaces a file atomically: a reader sees the old or the new one, never a part.

        Raises:
          OSError: If it cannot be written, or the path leads to another folder.
        """
        partial = name + ".partial"
        with self._opened() as folder:
            with self.open(partial, "wb") as file:
                for part in content:
                    write_all(file, part)
                os.fsync(file.fileno())
            os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._compare(os.fstat(descriptor))
            yield descriptor
        finally:
            os.close(descriptor)

    def _compare(self, now: os.stat_result) -> None:
        if self._first is not None and not os.path.samestat(now, self._first):
            raise OSError(f"{self.path} is another directory than at the start")


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Makes a folder and its missing parents, into which no other user writes.

    Raises:
      OSError: If it cannot be made.
    """
    for above in reversed(path.parents):
        if not above.exists():
            above.mkdir(0o777 & ~WRITE_BY_OTHERS, exist_ok=True)
    path.mkdir(mode & ~WRITE_BY_OTHERS, exist_ok=True)


def opener(path: str, flags: int) -> int:
    """Opens a file that no other user writes, as `open(opener=)` asks."""
    return os.open(path, flags, 0o666 & ~WRITE_BY_OTHERS)


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file atomically, wherever its folder is.

    Raises:
      OSError: If it cannot be written.
    """
    SameFolder(path.parent).replace(path.name, [content])


def write_all(file: IO[bytes], content: bytes) -> None:
    """Writes to an unbuffered file, which may take a part at a time."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def sync(path: Path) -> None:
    """Writes a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
