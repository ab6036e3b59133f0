"""Files and folders that no other user writes: replaced atomically, never in another folder.

    folder = SameFolder(run_dir)
    folder.pin()                                # the folder that is there now stays
    with folder.open("metrics.jsonl", "ab") as file: # an OSError if it is another folder by now
        ...

A run writes for days into a folder that it knows by its path. If that folder is moved away, and a
link or the folder of another run takes its place, nothing may be written there.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

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
            mode = 0o666 & ~WRITE_BY_OTHERS
            return os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=folder)

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
