"""Lists the SHA-256 of every file in a folder; this list makes the folder a checkpoint.

    seal(folder)               # reads every file back, and syncs all of it to the disk
    find_damage(folder)        # the first damaged file, or None

The list has the format of `sha256sum`, so `sha256sum --check SHA256SUMS` checks it too. The list
itself needs no digest: it begins with the number of its files, and all of them must be there, so
any flipped bit or torn end is found. A file that is not in the list, such as a note, an editor's
backup, `.DS_Store` or `.nfs*`, is not damage: it is reported and ignored.
"""

import concurrent.futures
import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from jddp.files import WRITE_BY_OTHERS, opener, sync_directory
from jddp.names import few

log = logging.getLogger("jddp")

NAME = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)\n")


def seal(folder: Path) -> None:
    """Lists the files of a folder, and syncs them, the list and every directory to the disk.

    Raises:
      OSError: If a file cannot be read or synced, or the list cannot be written.
    """
    # Orbax writes no hidden files: they are .nfs*, .DS_Store and the like, and may vanish again.
    names = [name for name in _files(folder) if "/." not in f"/{name}"]
    listed = _digests(folder, names, is_synced=True)
    with open(folder / NAME, "x", opener=opener) as file:
        file.write(_text_of(listed))
        file.flush()
        os.fsync(file.fileno())
    for directory in {folder, *(path for path in folder.rglob("*") if path.is_dir())}:
        with contextlib.suppress(OSError):
            directory.chmod(directory.stat().st_mode & 0o777 & ~WRITE_BY_OTHERS)
        sync_directory(directory)


def find_damage(folder: Path) -> str | None:
    """Describes the first file of a folder that is missing or has changed; None if none is.

    Files that are not in the list are reported in the log, and are not damage.
    """
    try:
        listed = _read_list(folder)
        there = {*_files(folder)}
        if missing := sorted(listed.keys() - there):
            name = missing[0]
            return f"{name} is {'a link' if (folder / name).is_symlink() else 'missing'}"
        found = _digests(folder, listed)
    except (OSError, ValueError) as error:
        return str(error)
    for name, digest in listed.items():
        if found.get(name) != digest:  # a file that was removed meanwhile too
            return f"{name} does not match its digest in {NAME}"
    if strays := sorted(there - listed.keys() - {NAME}):
        log.warning("%s: ignored, as no part of the checkpoint: %s.", folder, few(strays))
    return None


def names_listed(folder: Path) -> list[str]:
    """The files of a sealed folder, relative to it; the list itself is the last."""
    return [*_read_list(folder), NAME]


def _read_list(folder: Path) -> dict[str, str]:
    """The digest of each file by its name.

    Raises:
      OSError: If the list cannot be read.
      ValueError: If it is torn, altered or a link.
    """
    if (folder / NAME).is_symlink():
        raise ValueError(f"{NAME} is a link")
    text = (folder / NAME).read_bytes().decode()
    listed = {name: digest for digest, name in _LINE.findall(text)}
    if not listed or _text_of(listed) != text:
        raise ValueError(f"{NAME} is torn or altered")
    return listed


def _text_of(listed: dict[str, str]) -> str:
    """The list as text: a comment with the number of files, then a line for each file."""
    lines = [f"{digest}  {name}\n" for name, digest in listed.items()]
    return f"# {len(lines)} files\n{''.join(lines)}"


def _digests(folder: Path, names: Iterable[str], *, is_synced: bool = False) -> dict[str, str]:
    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            if is_synced:
                with contextlib.suppress(OSError):  # of a file system without modes
                    mode = os.fstat(file.fileno()).st_mode
                    os.fchmod(file.fileno(), mode & 0o777 & ~WRITE_BY_OTHERS)
                os.fsync(file.fileno())
        return found

    names = sorted(names)
    with concurrent.futures.ThreadPoolExecutor() as pool:  # hashlib releases the interpreter's lock
        return dict(zip(names, pool.map(digest, names), strict=True))


def _files(folder: Path) -> Iterator[str]:
    """Every regular file below a folder; links are not followed.

    Raises:
      OSError: If a directory cannot be read.
    """
    below = [""]
    while below:
        above = below.pop()
        with os.scandir(folder / above) as entries:
            for entry in entries:
                name = f"{above}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    below.append(f"{name}/")
                elif entry.is_file(follow_symlinks=False):
                    yield name
