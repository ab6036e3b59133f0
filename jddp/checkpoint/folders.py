"""The names in a directory of checkpoints, and which checkpoints stay.

`1200` is a finished checkpoint, complete before it got this name. `1300.new` is being written, or
was when the process ended; `1100.old` is being removed. `1000.damaged` had a wrong digest, and is
never removed.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from jddp.checkpoint.checksums import NAME, sync_directory
from jddp.errors import file_errors

# Those of all steps that are to be removed once a step has been saved.
Surplus = Callable[[list[int], int], list[int]]
_STEP = re.compile(r"0|[1-9][0-9]*")  # no other spelling, such as 030, is a name of a checkpoint
_UNFINISHED = re.compile(rf"({_STEP.pattern})\.(new|old)")


def finished(directory: Path) -> list[int]:
    """The steps of all checkpoints, damaged ones included, in order.

    Raises:
      FileSystemError: If the directory cannot be read.
    """
    with file_errors(f"{directory} cannot be read"):
        names = [x.name for x in os.scandir(directory) if x.is_dir(follow_symlinks=False)]
    return sorted(int(name) for name in names if _STEP.fullmatch(name))


def surplus(steps: list[int], saved: int, *, keep: int, keep_every: int | None = None) -> list[int]:
    """Steps to remove: all but the `keep` up to the one saved, and the multiples of `keep_every`.

    Later ones, from before the run resumed from an earlier step, are the first to be removed.
    """
    oldest = sorted(steps, key=lambda step: (step <= saved, step))[:-keep]
    return [step for step in oldest if keep_every is None or step % keep_every != 0]


def commit(directory: Path, step: int) -> None:
    """Renames the sealed `<step>.new` to `<step>`, in place of a checkpoint of that name."""
    there, old = directory / str(step), directory / f"{step}.old"
    if there.exists():  # from before the run resumed from an older checkpoint
        os.rename(there, old)
    os.rename(directory / f"{step}.new", there)
    sync_directory(directory)
    shutil.rmtree(old, ignore_errors=True)


def remove(directory: Path, step: int) -> None:
    """Removes a checkpoint atomically."""
    old = directory / f"{step}.old"
    os.rename(directory / str(step), old)
    sync_directory(directory)
    shutil.rmtree(old)


def remove_unfinished(directory: Path) -> None:
    """Removes what an ended process was writing or removing; names what was replacing another."""
    for old in directory.glob("*.old"):
        new, there = old.with_suffix(".new"), old.with_suffix("")
        if (new / NAME).exists() and not there.exists():  # between the two names of `commit`
            os.rename(new, there)
    for entry in os.scandir(directory):
        if _UNFINISHED.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)


def set_aside(directory: Path, step: int) -> Path:
    """Renames a damaged checkpoint, and returns its new path."""
    number, aside = 0, directory / f"{step}.damaged"
    while aside.exists():
        number += 1
        aside = directory / f"{step}.damaged.{number}"
    os.rename(directory / str(step), aside)
    sync_directory(directory)
    return aside


def first_line(error: BaseException) -> str:
    """The message of orbax, TensorStore or a file system in one line."""
    return next(iter(str(error).strip().splitlines()), repr(error))
