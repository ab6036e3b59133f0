"""The names in a directory of checkpoints, and which checkpoints stay.

`1200` is a finished checkpoint, complete before it got this name. `1300.new` is being written, or
was being written when the process ended. `1100.old` (or `1100.old.1`) is being removed, or could
not be removed. `1000.damaged` had a wrong digest, and is never removed.
"""

import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from jddp.checkpoint.checksums import NAME
from jddp.errors import ConfigError, file_errors
from jddp.files import sync_directory

# Function from the steps of all checkpoints, and the step just saved, to the steps to remove.
Surplus = Callable[[list[int], int], list[int]]
_STEP = re.compile(r"0|[1-9][0-9]*")  # no other spelling, such as 030, is a name of a checkpoint
_UNFINISHED = re.compile(rf"({_STEP.pattern})\.(new|old)(?:\.[0-9]+)?")


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
    """Steps to remove: all but the newest `keep`, and but multiples of `keep_every`.

    Steps above the saved one are from before the run resumed at an earlier step: they go first.
    """
    oldest = sorted(steps, key=lambda step: (step <= saved, step))[:-keep]
    return [step for step in oldest if keep_every is None or step % keep_every != 0]


def surplus_but(kept: Sequence[int], steps: list[int], saved: int) -> list[int]:
    """Steps to remove: all but those to keep, and the one that was saved last."""
    return [step for step in steps if step != saved and step not in kept]


def commit(directory: Path, step: int) -> None:
    """Renames the sealed `<step>.new` to `<step>`, replacing a checkpoint of that name."""
    there = directory / str(step)
    old = _free(directory / f"{step}.old")
    if there.exists():  # from before the run resumed from an older checkpoint
        os.rename(there, old)
    os.rename(directory / f"{step}.new", there)
    sync_directory(directory)
    shutil.rmtree(old, ignore_errors=True)


def remove(directory: Path, steps: Iterable[int]) -> str:
    """Removes checkpoints, each atomically, and the remains of earlier removals.

    Returns:
      The reason of the first failure; empty if everything was removed.
    """
    reason = ""
    for step in steps:
        try:
            os.rename(directory / str(step), _free(directory / f"{step}.old"))
            sync_directory(directory)
        except OSError as error:
            reason = reason or first_line(error)
    return _remove_old(directory) or reason


def remove_unfinished(directory: Path) -> str:
    """Removes the unfinished folders of an ended process, after completing its last replacement.

    Returns:
      The reason of the first failure; empty if everything was removed.
    """
    for _, step in _unfinished(directory, "old"):
        new = directory / f"{step}.new"
        there = directory / step
        if (new / NAME).exists() and not there.exists():  # between the two names of `commit`
            os.rename(new, there)
    for path, step in _unfinished(directory, "new"):
        os.rename(path, _free(directory / f"{step}.old"))  # or a later one would be mixed with it
    return _remove_old(directory)


def set_aside(directory: Path, step: int) -> Path:
    """Renames a damaged checkpoint, and returns its new path."""
    aside = _free(directory / f"{step}.damaged")
    os.rename(directory / str(step), aside)
    sync_directory(directory)
    return aside


def _unfinished(directory: Path, suffix: str) -> list[tuple[Path, str]]:
    """The folders with a suffix, each with its step."""
    with os.scandir(directory) as entries:
        folders = [Path(x.path) for x in entries if x.is_dir(follow_symlinks=False)]
    matches = [(path, _UNFINISHED.fullmatch(path.name)) for path in folders]
    return [(path, match[1]) for path, match in matches if match and match[2] == suffix]


def _remove_old(directory: Path) -> str:
    """Removes folders that were renamed for removal; returns the reason of the first failure."""
    reason = ""
    for path, _ in _unfinished(directory, "old"):
        try:
            shutil.rmtree(path)
        except OSError as error:
            reason = reason or first_line(error)
    return reason


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
