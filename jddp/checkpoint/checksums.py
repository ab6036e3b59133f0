"""The sha256 of every file in a folder, in a list that makes the folder a checkpoint.

    seal(folder)               # reads every file back, and syncs all of it to the disk
    find_damage(folder)        # the first damaged file, or None

The list is in the form of `sha256sum`, so that `sha256sum --check SHA256SUMS` checks it too. The
list itself needs no digest: the files in the folder must be the files listed, so that any flipped
bit of the list is found.
"""

import concurrent.futures
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

NAME = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)\n")


def seal(folder: Path) -> None:
    """Lists the files of a folder, and syncs them, the list and every directory to the disk.

    Raises:
      OSError: If a file cannot be read or synced, or the list cannot be written.
    """
    listed = _digests(folder, is_synced=True)
    with (folder / NAME).open("x") as file:
        file.writelines(f"{digest}  {name}\n" for name, digest in listed.items())
        file.flush()
        os.fsync(file.fileno())
    for directory in {folder, *(path for path in folder.rglob("*") if path.is_dir())}:
        sync_directory(directory)


def find_damage(folder: Path) -> str | None:
    """Describes the first file of a folder that is not as it was written; None if there is none."""
    try:
        text = (folder / NAME).read_bytes().decode()
        lines = _LINE.findall(text)
        if not lines or "".join(f"{digest}  {name}\n" for digest, name in lines) != text:
            return f"{NAME} is torn or altered"
        listed = {name: digest for digest, name in lines}
        for name in sorted(listed.keys() ^ set(_files(folder))):
            return f"{name} is {'missing' if name in listed else 'not listed'}"
        found = _digests(folder)
    except (OSError, UnicodeDecodeError) as error:
        return str(error)
    for name, digest in listed.items():
        if found.get(name) != digest:  # a file that was removed meanwhile too
            return f"{name} has another digest than in {NAME}"
    return None


def sync_directory(path: Path) -> None:
    """Writes the entries of a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digests(folder: Path, *, is_synced: bool = False) -> dict[str, str]:
    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            if is_synced:
                os.fsync(file.fileno())
        return found

    names = sorted(_files(folder))
    with concurrent.futures.ThreadPoolExecutor() as pool:  # hashlib releases the interpreter's lock
        return dict(zip(names, pool.map(digest, names), strict=True))


def _files(folder: Path) -> Iterator[str]:
    """Every file below a folder but the list; a link is not followed, and is refused.

    Raises:
      OSError: If there is a link, or a directory cannot be read.
    """
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise OSError(f"{path.relative_to(folder)} is a link")
        if not path.is_dir() and path != folder / NAME:
            yield path.relative_to(folder).as_posix()
