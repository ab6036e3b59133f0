"""`jddp COMMAND ...`, or `python -m jddp COMMAND ...`: runs a command; without one, lists them all.

Without a command it exits with 2. `jddp.train` and `jddp.launch` are modules, too.
"""

import importlib
import sys
from collections.abc import Sequence

from jddp.config.versions import versions
from jddp.ground import names
from jddp.ground.errors import ExitCode, report

COMMANDS = {
    "init": "start a project: a config, a model, a loss and data to change",
    "train": "train a model from a config",
    "launch": "start the processes of a job, on one host or several",
    "evaluate": "evaluate a run again, on its data or on other data",
    "predict": "write what a run predicts for rows, images or a text",
    "report": "judge a run, and write a page with its curves and times",
    "compare": "tell which run is better, by how much, and what differs",
    "explain": "compile a step, and list what it sends and when",
    "tune": "find the fastest way to send gradients, or the largest batch",
    "verify": "compare a step on all devices with one on a single device",
    "doctor": "check this host, or this job, before training",
    "checkpoint": "list, verify and export checkpoints",
    "data": "write token files",
}
# Modules of `jddp.commands` that have several commands; each other module is one.
SHARED = {"evaluate": "runs", "predict": "runs", "explain": "checks", "verify": "checks"}
SHARED |= {"checkpoint": "runs", "doctor": "checks", "init": "prepare", "data": "prepare"}
WORKBENCH = {"report", "compare", "tune"}  # Found by their entry points.
TABLE = "\n".join(f"  jddp {name:<11} {about}" for name, about in COMMANDS.items())
HELP = f"""\
usage: jddp COMMAND [--help] ..., or jddp --version

{TABLE}

Each has --help.
Start with: jddp train train.num_steps=20 run.dir=runs/try"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that is named first with the other arguments; returns its exit code."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in COMMANDS.keys() - WORKBENCH:
        module = importlib.import_module(f"jddp.commands.{SHARED.get(name, name)}")
        return int(getattr(module, f"{name}_command" if name in SHARED else "main")(rest))
    if name == "--version":
        found = versions()
        print(f"jddp {found.pop('jddp')}")
        print("\n".join(f"  {package} {version}" for package, version in found.items()))
        return ExitCode.DONE
    if (added := names.find(names.COMMANDS, name)) is not None:
        return int(added(rest))
    if name in WORKBENCH:
        report(f"{name} needs jddp.workbench, which is not installed. Install the whole package.")
        return ExitCode.USAGE
    print(HELP)
    if name in ("-h", "--help"):
        return ExitCode.DONE
    if name:
        report(f"there is no command {name!r}. Choose one of these.")
    return ExitCode.USAGE


if __name__ == "__main__":
    sys.exit(main())
