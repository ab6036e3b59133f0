"""`python -m jddp.explain [--config FILE]... [key.path=value]...`: what does a step send?

Takes a job as `jddp.train` does, compiles its step for the devices of its mesh, and prints the plan
beside the collectives of the compiled program, as `jddp.explain` does for objects. With `--target`
the step is compiled for GPUs that need not be there, and its time and memory are modelled. Nothing
runs, nothing but the picture is written, and the data may be absent.

`python -m jddp.explain --trace RUN_DIR` prints how the time of traced steps was spent.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from jddp.commands.target import add_target_arguments, check_target
from jddp.config.cli import Parser, add_config_arguments, run_command, share_gpus
from jddp.errors import ExitCode, UsageError, file_errors, show


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    description = "Compile a step of a job, and list what it sends. Nothing is run."
    parser = Parser(prog="python -m jddp.explain", description=description)
    add_config_arguments(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="print one line of JSON instead")
    add_target_arguments(parser)
    scaling = "also model 1, 8, 32 and 128 hosts of the target, with as many rows on each"
    add("--scaling", action="store_true", help=scaling)
    add("--trace", metavar="RUN_DIR", help="print the times of a trace instead")
    add("--html", metavar="FILE", help="write a picture of the modelled step")
    return run_command(lambda: _run(parser.parse_intermixed_args(argv)))


def _run(arguments: argparse.Namespace) -> int:
    _refuse_combinations(arguments)
    if arguments.trace is not None:
        return _read_trace(arguments)
    return _explain(arguments) if arguments.target is None else _predict(arguments)


def _refuse_combinations(arguments: argparse.Namespace) -> None:
    if arguments.trace is not None and arguments.target is not None:
        raise UsageError("--trace and --target cannot be combined: one is measured, one modelled.")
    check_target(arguments, "scaling", "html")


def _read_trace(arguments: argparse.Namespace) -> int:
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


def _predict(arguments: argparse.Namespace) -> int:
    # With GPUs of its own JAX would compile for those alone.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jddp.config.files import load_config

    config, _ = load_config(arguments.config, arguments.overrides)
    from jddp.inspection.explain import explain
    from jddp.inspection.modelled.described import Target
    from jddp.job.job import build

    gpu, topology, links = arguments.target, arguments.topology or "1x8", arguments.link
    mesh = Target.named(gpu, topology, links).mesh()
    job = build(config, needs_data=False, mesh=mesh)
    options = {"topology": topology, "links": links, "scaling": arguments.scaling}
    found = explain(job.ddp, job.batch_spec, target=gpu, **options)
    if arguments.html:
        with file_errors(f"--html {arguments.html} cannot be written"):
            Path(arguments.html).write_text(found.as_html(), encoding="utf-8")
    show(json.dumps(found.as_json()) if arguments.json else str(found))
    return ExitCode.DONE
