"""`jddp explain`, `jddp verify` and `jddp doctor`: checks of a job and of its machines.

The first two take a job as `jddp train` does: `[--config FILE]... [key.path=value]...`.

`explain` compiles its step for the devices of its mesh, and prints the plan next to the collectives
of the compiled program, as `jddp.explain` does for objects. With `--target` the step is compiled
for GPUs or TPUs that need not be there; for GPUs its time and memory are modelled. Nothing runs or
is written, and the data may be absent.

`jddp explain --trace RUN_DIR` prints how the time of traced steps was spent; with
`--target` too, next to the modelled times for the config of that run.

`verify` compares a step on the mesh with the same step on a single device, as `jddp.verify` does
for objects. Exit code 0 if they are equal within rounding, else 76.

Start `doctor` the way you start the job, under the same launcher: every process examines its host
and devices, and all together examine versions, the shared directory and the network. Each finding
comes with its fix. The exit code is 0, or 69 if a finding will stop a job.

`jddp doctor RUN_DIR` prints the first failure of a run, and examines nothing.
`jddp doctor --gpu-acceptance` tries jddp on the GPUs, and writes a page.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jddp.config import cli
from jddp.distributed.command import run_command
from jddp.distributed.failure_file import VARIABLE, headline, read_failure
from jddp.ground.errors import ExitCode, FileSystemError, UsageError, show
from jddp.ground.files import expand
from jddp.ground.names import tool

# Only a checkout has this file.
ACCEPTANCE = Path(__file__).parents[2] / "benchmarks" / "gpu_acceptance.py"


def explain_command(argv: Sequence[str] | None = None) -> int:
    """Runs `jddp explain` and returns its exit code."""
    description = "Compile a step of a job, and list what it sends. Nothing is run."
    parser = cli.Parser(prog="jddp explain", description=description)
    cli.add_config_arguments(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="print one line of JSON instead")
    cli.add_target_arguments(parser)
    scaling = "also model 1, 8, 32 and 128 hosts of the target, with as many rows on each"
    add("--scaling", action="store_true", help=scaling)
    traced = "print the times of a trace instead; with --target next to the modelled times"
    add("--trace", type=Path, metavar="RUN_DIR", help=traced)
    return run_command(lambda: explain_job(parser.parse_intermixed_args(argv)))


def explain_job(arguments: argparse.Namespace) -> int:
    """Compiles a step of a job, and prints its report; returns the exit code."""
    cli.check_target(arguments, "scaling")
    if arguments.target or arguments.trace:
        if arguments.target:
            # JAX is not imported yet. With GPUs here it would compile for these GPUs alone.
            os.environ["JAX_PLATFORMS"] = "cpu"
        return int(tool("explain", "--target or --trace")(arguments))
    from jddp.config.files import load_config

    config, _ = load_config(arguments.config, arguments.overrides)
    from jddp.inspection.explain import explain
    from jddp.trainer.job.build import build

    cli.share_gpus()  # A job may be running there.
    job = build(config, needs_data=False)
    step = explain(job.ddp, job.batch_spec)
    show(json.dumps(step.as_json()) if arguments.json else str(step))
    return ExitCode.DONE


def verify_command(argv: Sequence[str] | None = None) -> int:
    """Runs `jddp verify` and returns its exit code."""
    description = "Compare a step of a job on its devices with the same step on one device."
    parser = cli.Parser(prog="jddp verify", description=description)
    cli.add_config_arguments(parser)
    return run_command(lambda: _verify(parser.parse_intermixed_args(argv)))


def _verify(arguments: argparse.Namespace) -> int:
    from jddp.config.files import load_config

    config, name = load_config(arguments.config, arguments.overrides)
    from jddp.trainer.job.build import build

    cli.share_gpus()  # A job may be running there.
    report = build(config).verify()
    show(f"{name}: {report}")
    return ExitCode.DONE if report.passed else ExitCode.REPLICA_MISMATCH


def doctor_command(argv: Sequence[str] | None = None) -> int:
    """Runs `jddp doctor` and returns its exit code."""
    return run_command(lambda: _examine(_doctor_parser().parse_args(argv)))


def _doctor_parser() -> cli.Parser:
    about = "Check for causes of failed jobs, and print their fixes."
    parser = cli.Parser(prog="jddp doctor", description=about)
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


def _examine(arguments: argparse.Namespace) -> int:
    if arguments.gpu_acceptance is not None:
        return _accept(arguments)
    if arguments.run is not None:
        return _print_failures(arguments.run)
    cli.share_gpus()  # A job may be running there.
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
