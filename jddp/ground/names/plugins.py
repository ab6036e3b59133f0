"""Finds the commands and options that packages add to jddp, by their entry points.

    [project.entry-points."jddp.commands"]     # `jddp report`: a function of the arguments
    report = "jddp.workbench.report:main"
    [project.entry-points."jddp.options"]      # `jddp train --sweep`: the function behind it
    sweep = "jddp.workbench.sweep:run_sweep"
    [project.entry-points."jddp.callbacks"]    # `callbacks: [{name: sample_text}]` of a config
    [project.entry-points."jddp.sinks"]        # `report.sinks=[wandb]`: a class with the attribute
                                               # `package`, made with a `Start`
    [project.entry-points."jddp.run_ended"]    # called at the end of a run with its directory and
                                               # name; returns files for it, {name: content}

`jddp.workbench` is found in this way only, as any other package is. `jddp.DataParallel` also finds
the reader of weights in this way: it needs no checkpoints to train.
"""

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from jddp.ground.errors import UsageError

Function = Callable[..., Any]
COMMANDS, OPTIONS = "jddp.commands", "jddp.options"
ADDED_CALLBACKS, RUN_ENDED, SINKS = "jddp.callbacks", "jddp.run_ended", "jddp.sinks"


def added(group: str) -> Iterator[tuple[str, Function]]:
    """Imports the functions that packages add to a group, and yields each with its name."""
    for point in entry_points(group=group):
        if (function := _loaded(point)) is not None:
            yield point.name, function


def find(group: str, name: str) -> Function | None:
    """Imports the function that a package adds under a name; None if no package adds one."""
    found = map(_loaded, entry_points(group=group, name=name))
    return next(filter(None, found), None)


def _loaded(point: EntryPoint) -> Function | None:
    try:
        return point.load()
    except ModuleNotFoundError as error:
        if error.name and f"{point.module}.".startswith(f"{error.name}."):
            return None  # A package that was removed is still listed by its installation.
        raise


def tool(name: str, asked: str = "", package: str = "jddp.workbench") -> Function:
    """Imports the function behind an option.

    Args:
      name: Name of its entry point.
      asked: The option as its user knows it; by default `--name`.
      package: The package that names the entry point.

    Raises:
      UsageError: If its package is not installed.
    """
    if (found := find(OPTIONS, name)) is None:
        raise UsageError(
            f"{asked or f'--{name}'} needs {package}, which is not installed here. Install the "
            "whole package jddp."
        )
    return found
