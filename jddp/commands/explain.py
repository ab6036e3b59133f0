"""`python -m jddp.explain [--config FILE]... [key.path=value]...`: what does a step send?

Takes a job as `jddp.train` does, compiles its step for the devices of its mesh, and prints the plan
beside the collectives of the compiled program, as `jddp.explain` does for objects. With `--target`
the step is compiled for GPUs that need not be there, and its time and memory are modelled. Nothing
runs, nothing but the picture is written, and the data may be absent.

`python -m jddp.explain --trace RUN_DIR` prints how the time of traced steps was spent; with
`--target` too, beside what is modelled for the config of that run.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jddp.commands.output import check_output, write_output
from jddp.commands.target import add_target_arguments, check_target
from jddp.config.cli import Parser, add_config_arguments, run_command, share_gpus
from jddp.errors import ExitCode, UsageError, show
from jddp.typing import JsonObject

if TYPE_CHECKING:
    from jddp.inspection.explain import Explanation
    from jddp.inspection.trace import Trace


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
    traced = "print the times of a trace instead; with --target beside those of its modelled step"
    add("--trace", type=Path, metavar="RUN_DIR", help=traced)
    picture = "write a picture of the modelled or traced step"
    add("--html", type=Path, metavar="FILE", help=picture)
    return run_command(lambda: _run(parser.parse_intermixed_args(argv)))


def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    if arguments.target is not None:
        # With GPUs of its own JAX would compile for those alone.
        os.environ["JAX_PLATFORMS"] = "cpu"
    trace = None if arguments.trace is None else _traced(arguments)
    is_explained = trace is None or arguments.target is not None
    step = _explained(arguments) if is_explained else None
    if arguments.html is not None:
        _draw(arguments.html, trace, step)
    show(json.dumps(_as_json(trace, step)) if arguments.json else _as_text(trace, step))
    return ExitCode.DONE


def _check(arguments: argparse.Namespace) -> None:
    check_target(arguments, "scaling")
    if arguments.html is not None and arguments.target is None and arguments.trace is None:
        raise UsageError("--html needs --target or --trace: it draws a modelled or a traced step.")
    check_output("--html", arguments.html)


def _traced(arguments: argparse.Namespace) -> "Trace":
    from jddp.inspection.trace import read_trace

    return read_trace(arguments.trace)


def _explained(arguments: argparse.Namespace) -> "Explanation":
    from jddp.config.files import load_config

    config, _ = load_config(_configs(arguments), arguments.overrides)
    from jddp.inspection.explain import explain
    from jddp.inspection.modelled.described import Target
    from jddp.job.job import build

    if arguments.target is None:
        share_gpus()  # with a job that may run there
        job = build(config, needs_data=False)
        return explain(job.ddp, job.batch_spec)
    gpu, topology, links = arguments.target, arguments.topology or "1x8", arguments.link
    mesh = Target.named(gpu, topology, links).mesh()
    job = build(config, needs_data=False, mesh=mesh)
    options = {"topology": topology, "links": links, "scaling": arguments.scaling}
    return explain(job.ddp, job.batch_spec, target=gpu, **options)


def _configs(arguments: argparse.Namespace) -> list[str]:
    """The configs that are named; or else that of the traced run."""
    if arguments.config or arguments.trace is None:
        return list(arguments.config)
    own = arguments.trace / "config.yaml"
    if not own.is_file():
        raise UsageError(f"{own} is not there. Name the config of the traced step by --config.")
    return [str(own)]


def _draw(path: Path, trace: "Trace | None", step: "Explanation | None") -> None:
    from jddp.inspection.measured_picture import measured_picture
    from jddp.inspection.modelled.picture import modelled_picture
    from jddp.inspection.pictures.page import draw_page

    steps = [] if trace is None else [measured_picture(trace)]
    if step is not None and step.prediction is not None:
        steps.append(modelled_picture(step.prediction))
    write_output("--html", path, draw_page(*steps))


def _as_json(trace: "Trace | None", step: "Explanation | None") -> JsonObject:
    if step is None:
        assert trace is not None  # One of them is there.
        return trace.as_json()
    return step.as_json() | ({} if trace is None else {"measured": trace.as_json()})


def _as_text(trace: "Trace | None", step: "Explanation | None") -> str:
    from jddp.inspection.pictures.times import times_as_text

    parts = [str(x) for x in (trace, step) if x is not None]
    if trace is not None and step is not None and step.prediction is not None:
        parts.insert(1, times_as_text([trace.times, step.prediction.times]))
    return "\n\n".join(parts)
