"""`jddp explain` and `jddp verify`: what does a step send, and do N devices equal one?

Both take a job as `jddp train` does: `[--config FILE]... [key.path=value]...`.

`explain` compiles its step for the devices of its mesh, and prints the plan
next to the collectives of the compiled program, as `jddp.explain` does for objects. With `--target`
the step is compiled for GPUs that need not be there, and its time and memory are modelled. Nothing
runs or is written, and the data may be absent.

`jddp explain --trace RUN_DIR` prints how the time of traced steps was spent; with
`--target` too, next to the modelled times for the config of that run.

`verify` compares a step on the mesh with the same step on a single device, as `jddp.verify` does
for objects. Exit code 0 if they are equal within rounding, else 76.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from jddp.config.cli import (
    Parser,
    add_config_arguments,
    add_target_arguments,
    check_target,
    share_gpus,
)
from jddp.distributed.command import run_command
from jddp.ground.errors import ExitCode, show
from jddp.ground.names.plugins import tool


def explain_command(argv: Sequence[str] | None = None) -> int:
    """Runs `jddp explain` and returns its exit code."""
    description = "Compile a step of a job, and list what it sends. Nothing is run."
    parser = Parser(prog="jddp explain", description=description)
    add_config_arguments(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="print one line of JSON instead")
    add_target_arguments(parser)
    scaling = "also model 1, 8, 32 and 128 hosts of the target, with as many rows on each"
    add("--scaling", action="store_true", help=scaling)
    traced = "print the times of a trace instead; with --target next to the modelled times"
    add("--trace", type=Path, metavar="RUN_DIR", help=traced)
    return run_command(lambda: _explain(parser.parse_intermixed_args(argv)))


def _explain(arguments: argparse.Namespace) -> int:
    check_target(arguments, "scaling")
    if arguments.target or arguments.trace:
        if arguments.target:
            # JAX is not imported yet. With GPUs here it would compile for these GPUs alone.
            os.environ["JAX_PLATFORMS"] = "cpu"
        return int(tool("explain", "--target or --trace")(arguments))
    from jddp.config.files import load_config

    config, _ = load_config(arguments.config, arguments.overrides)
    from jddp.inspection.explain import explain
    from jddp.trainer.job.build import build

    share_gpus()  # A job may be running there.
    job = build(config, needs_data=False)
    step = explain(job.ddp, job.batch_spec)
    show(json.dumps(step.as_json()) if arguments.json else str(step))
    return ExitCode.DONE


def verify_command(argv: Sequence[str] | None = None) -> int:
    """Runs `jddp verify` and returns its exit code."""
    description = "Compare a step of a job on its devices with the same step on one device."
    parser = Parser(prog="jddp verify", description=description)
    add_config_arguments(parser)
    return run_command(lambda: _verify(parser.parse_intermixed_args(argv)))


def _verify(arguments: argparse.Namespace) -> int:
    from jddp.config.files import load_config

    config, name = load_config(arguments.config, arguments.overrides)
    from jddp.trainer.job.build import build

    share_gpus()  # A job may be running there.
    report = build(config).verify()
    show(f"{name}: {report}")
    return ExitCode.DONE if report.passed else ExitCode.REPLICA_MISMATCH
