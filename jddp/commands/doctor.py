"""`jddp doctor`: preflight check of a machine or of a job.

Start it the way you start the job, under the same launcher: every process examines its host and
devices, and all together examine versions, the shared directory and the network. Each finding comes
with its fix. The exit code is 0, or 69 if a finding will stop a job.

`jddp doctor RUN_DIR` prints the first failure of a run, and examines nothing.
`jddp doctor --gpu-acceptance` tries jddp on the GPUs, and writes a page.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jddp.config.cli import Parser, share_gpus
from jddp.config.permissions import expand
from jddp.distributed.command import run_command
from jddp.distributed.failure_file import VARIABLE, headline, read_failure
from jddp.ground.errors import ExitCode, FileSystemError, UsageError, show

# Only a checkout has this file.
ACCEPTANCE = Path(__file__).parents[2] / "benchmarks" / "gpu_acceptance.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    return run_command(lambda: _act(_doctor_parser().parse_args(argv)))


def _doctor_parser() -> Parser:
    about = "Check for causes of failed jobs, and print their fixes."
    parser = Parser(prog="jddp doctor", description=about)
    add = parser.add_argument
    add("run", type=expand, nargs="?", help="only print the first failures of this run directory")
    shared = "a directory that all processes share (runs)"
    add("--dir", type=expand, default=Path("runs"), help=shared)
    add("--num-devices", type=int, default=8, help="virtual CPU devices if there is no GPU (8)")
    page = Path("gpu_acceptance.md")
    about = "test and measure the GPUs in minutes; write a page"
    add("--gpu-acceptance", nargs="?", const=page, type=expand, metavar="PAGE", help=about)
    trial = "cpu tries --gpu-acceptance on virtual devices (gpu)"
    add("--platform", choices=["gpu", "cpu"], default="gpu", help=trial)
    return parser


def _act(arguments: argparse.Namespace) -> int:
    if arguments.gpu_acceptance is not None:
        return _accept(arguments)
    if arguments.run is not None:
        return _print_failures(arguments.run)
    share_gpus()  # A job may be running there.
    from jddp.inspection.doctor import examine

    is_fit = examine(arguments.dir, num_devices=arguments.num_devices)
    return ExitCode.DONE if is_fit else ExitCode.UNAVAILABLE


def _accept(arguments: argparse.Namespace) -> int:
    if not ACCEPTANCE.exists():
        raise UsageError(
            "--gpu-acceptance is a part of the repository, and not of the installed package. "
            "Clone the repository, and run it from there: jddp doctor --gpu-acceptance."
        )
    command = [sys.executable, ACCEPTANCE, arguments.gpu_acceptance]
    command += ["--platform", arguments.platform, "--num-devices", str(arguments.num_devices)]
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}).returncode


def _print_failures(run: Path) -> int:
    """Prints the failures in the files of a run, or a launch's logs, and in JDDP_FAILURE_FILE."""
    if not run.is_dir():
        raise FileSystemError(f"{run} is not a folder. Name a run directory, or a launch's logs.")
    paths = [path for folder in (run, run / "logs") for path in folder.glob("failure*.json")]
    paths += [Path(path) for path in [os.environ.get(VARIABLE)] if path]
    failures = {
        path: failure for path in sorted(paths) if (failure := read_failure(path)) is not None
    }
    for path, failure in failures.items():
        when = "{time}, in phase {phase} after step {step}" if failure["phase"] else "{time}"
        trace = str(failure["traceback"] or "").splitlines()
        show("\n  ".join([str(path), headline(failure), when.format_map(failure), *trace]))
    if not failures:
        show(f"{run} has no first failure")
    return ExitCode.DONE
