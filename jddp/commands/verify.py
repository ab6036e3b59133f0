"""`jddp verify [--config FILE]... [key.path=value]...`: do N devices equal one?

Takes a job as `jddp.train` does, and compares a step on its mesh with the same step on a single
device, as `jddp.verify` does for objects. Exit code 0 if they are equal within rounding, else 76.
"""

import argparse
from collections.abc import Sequence

from jddp.config.cli import Parser, add_config_arguments, share_gpus
from jddp.distributed.command import run_command
from jddp.ground.errors import ExitCode, show


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
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
