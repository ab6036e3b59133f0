"""The folder of a checkpoint: its name in a directory, and the digests of its files.

    seal(folder)               # reads every file back, and syncs all of it to the disk
    find_damage(folder)        # the first damaged file, or None

`1200` is a finished checkpoint, complete before it got this name. `1300.new` is being written, or
was being written when the process ended. `1100.old` (or `1100.old.1`) is being removed, or could
not be removed. `1000.damaged` had a wrong digest, and is never removed.

SHA256SUMS lists the SHA-256 of every file, in the format of `sha256sum --check`; this list makes
the folder a checkpoint. The list itself needs no digest: it begins with the number of its files,
and all of them must be there, so any flipped bit or torn end is found. A file that is not in the
list, such as a note, an editor's backup, `.DS_Store` or `.nfs*`, is ignored.
"""

import concurrent.futures
import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from jddp.ground.errors import ConfigError, file_errors
from jddp.ground.files import opener, sync

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)\n")
# Function from the steps of all checkpoints, and the step just saved, to the steps to remove.
Surplus = Callable[[list[int], int], list[int]]
_STEP = re.compile(r"0|[1-9][0-9]*")  # No other spelling, such as 030, is a name of a checkpoint.
_UNFINISHED = re.compile(rf"({_STEP.pattern})\.(new|old)(?:\.[0-9]+)?")


def seal(folder: Path) -> None:
    """Lists the files of a folder, and syncs them, the list and every directory to the disk.

    Raises:
      OSError: If a file cannot be read or synced, or the list cannot be written.
    """
    # Orbax writes no hidden files: they are .nfs*, .DS_Store and the like, and may vanish again.
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    listed = _digests(folder, [name for name in names if "/." not in f"/{name}"])
    with open(folder / SUMS, "x", opener=opener) as file:
        file.write(_text_of(listed))
    for path in (*map(folder.joinpath, listed), folder / SUMS, *folder.rglob("*/"), folder):
        sync(path)


def find_damage(folder: Path) -> str | None:
    """Describes the first file of a folder that is missing or has changed; None if none is.

    Files that are not in the list are ignored.
    """
    try:
        listed = _read_list(folder)
        found = _digests(folder, listed)
    except (OSError, ValueError) as error:
        return str(error)
    differ = (name for name in listed if found[name] != listed[name])
    return next((f"{name} does not match its digest in {SUMS}" for name in differ), None)


def names_listed(folder: Path) -> list[str]:
    """The files of a sealed folder, relative to it; the list itself is the last."""
    return [*_read_list(folder), SUMS]


def _read_list(folder: Path) -> dict[str, str]:
    """The digest of each file by its name.

    Raises:
      OSError: If the list cannot be read.
      ValueError: If it is torn, altered or a link.
    """
    if (folder / SUMS).is_symlink():
        raise ValueError(f"{SUMS} is a link")
    text = (folder / SUMS).read_bytes().decode()
    listed = {name: digest for digest, name in _LINE.findall(text)}
    if not listed or _text_of(listed) != text:
        raise ValueError(f"{SUMS} is torn or altered")
    return listed


def _text_of(listed: dict[str, str]) -> str:
    """The list as text: a comment with the number of files, then a line for each file."""
    lines = [f"{digest}  {name}\n" for name, digest in listed.items()]
    return f"# {len(lines)} files\n{''.join(lines)}"


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    def digest(name: str) -> str:
        path = folder / name
        if not path.is_file() or path.resolve() != folder.resolve() / name:
            raise ValueError(f"{name} is missing, or a link")
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    names = sorted(names)
    with concurrent.futures.ThreadPoolExecutor() as pool:  # hashlib releases the interpreter's lock
        return dict(zip(names, pool.map(digest, names), strict=True))


def finished(directory: Path) -> list[int]:
    """The steps of all checkpoints, damaged ones included, in order.

    Raises:
      FileSystemError: If the directory cannot be read.
    """
    with file_errors(f"{directory} cannot be read"):
        names = [x.name for x in os.scandir(directory) if x.is_dir(follow_symlinks=False)]
    return sorted(int(name) for name in names if _STEP.fullmatch(name))


def directory_of(path: Path) -> Path:
    """The checkpoints of a run directory; or the directory itself, if it holds some.

    Raises:
      ConfigError: If there are none.
    """
    for directory in (path / "checkpoints", path):
        if directory.is_dir() and (directory.name == "checkpoints" or finished(directory)):
            return directory
    raise ConfigError(f"{path} holds no checkpoints. Name a run directory.")


def surplus(steps: list[int], saved: int, *, keep: int, keep_every: int | None = None) -> list[int]:
    """The steps to remove: all except the newest `keep` and the multiples of `keep_every`.

    Steps above the saved one are from before the run resumed at an earlier step: they go first.
    """
    oldest = sorted(steps, key=lambda step: (step <= saved, step))[:-keep]
    return [step for step in oldest if keep_every is None or step % keep_every != 0]


def commit(directory: Path, step: int) -> None:
    """Renames the sealed `<step>.new` to `<step>`, replacing a checkpoint of that name."""
    there = directory / str(step)
    old = _free(directory / f"{step}.old")
    if there.exists():  # A save from before the run resumed at an earlier step.
        os.rename(there, old)
    os.rename(directory / f"{step}.new", there)
    sync(directory)
    shutil.rmtree(old, ignore_errors=True)


def remove(directory: Path, steps: Iterable[int] = ()) -> str:
    """Removes checkpoints, each atomically, and the remains of earlier removals.

    Returns:
      The reason why something is left; empty if everything was removed.
    """
    for step in steps:
        os.rename(directory / str(step), _free(directory / f"{step}.old"))
    sync(directory)
    for path, _ in _unfinished(directory, "old"):
        shutil.rmtree(path, ignore_errors=True)
    left = [path.name for path, _ in _unfinished(directory, "old")]
    return f"the file system keeps {', '.join(left)}" if left else ""


def remove_unfinished(directory: Path) -> str:
    """Removes the unfinished folders of an ended process, after completing its last replacement.

    Returns:
      The reason why something is left; empty if everything was removed.
    """
    for _, step in _unfinished(directory, "old"):
        new = directory / f"{step}.new"
        there = directory / step
        if (new / SUMS).exists() and not there.exists():  # `commit` was interrupted.
            os.rename(new, there)
    for path, step in _unfinished(directory, "new"):
        os.rename(path, _free(directory / f"{step}.old"))  # A later save would add to it.
    return remove(directory)


def set_aside(directory: Path, step: int) -> Path:
    """Renames a damaged checkpoint, and returns its new path."""
    aside = _free(directory / f"{step}.damaged")
    os.rename(directory / str(step), aside)
    sync(directory)
    return aside


def _unfinished(directory: Path, suffix: str) -> list[tuple[Path, str]]:
    """The folders with a suffix, each with its step."""
    with os.scandir(directory) as entries:
        folders = [Path(x.path) for x in entries if x.is_dir(follow_symlinks=False)]
    matches = [(path, _UNFINISHED.fullmatch(path.name)) for path in folders]
    return [(path, match[1]) for path, match in matches if match and match[2] == suffix]


def _free(path: Path) -> Path:
    """The path; or, if it exists, the first free one with a number."""
    numbers = itertools.count(1)
    free = path
    while os.path.lexists(free):
        free = path.with_name(f"{path.name}.{next(numbers)}")
    return free


def first_line(error: BaseException) -> str:
    """The message of orbax, TensorStore or a file system in one line."""
    return next(iter(str(error).strip().splitlines()), repr(error))
