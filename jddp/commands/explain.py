"""`python -m jddp.explain [--config FILE]... [key.path=value]...`: what does a step send?

Takes a job as `jddp.train` does, compiles its step for the devices of its mesh, and prints the plan
beside the collectives of the compiled program, as `jddp.explain` does for objects. Nothing runs,
nothing is written, and the data may be absent.

`python -m jddp.explain --trace RUN_DIR` prints how the time of traced steps was spent.
"""

import argparse
import json
from collections.abc import Sequence

from jddp.config.cli import Parser, add_config_arguments, run_command, share_gpus
from jddp.errors import ExitCode, show


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    description = "Compile a step of a job, and list what it sends. Nothing is run or written."
    parser = Parser(prog="python -m jddp.explain", description=description)
    add_config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead")
    parser.add_argument("--trace", metavar="RUN_DIR", help="print the times of a trace instead")
    return run_command(lambda: _run(parser.parse_intermixed_args(argv)))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.trace is None:
        return _explain(arguments)
    from jddp.inspection.trace import read_trace

    found = read_trace(arguments.trace)
    show(json.dumps(found.as_json()) if arguments.json else str(found))
    return ExitCode.DONE


def _explain(arguments: argparse.Namespace) -> int:
    from jddp.config.files import load_config

    config, _ = load_config(arguments.config, arguments.overrides)
    from jddp.inspection.explain import explain
    from jddp.job.job import build

    share_gpus()  # with a job that may run there
    job = build(config, needs_data=False)
    found = explain(job.ddp, job.batch_spec)
    show(json.dumps(found.as_json()) if arguments.json else str(found))
    return ExitCode.DONE
