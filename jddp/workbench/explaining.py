"""`jddp explain --target GPU` and `--trace RUN_DIR`: where the time of a step goes.

With `--trace` it is the time of traced steps; with `--target` too, next to the times that are
modelled for the config of that run.
"""

import argparse
import json

from jddp.config.cli import check_output, write_output
from jddp.config.files import load_config
from jddp.ground.errors import ExitCode, UsageError, show
from jddp.ground.typing import JsonObject
from jddp.inspection.explain import Explanation, explain
from jddp.trainer.job.build import build
from jddp.workbench.modelled.described import Target
from jddp.workbench.step_times import draw_page, times_as_text
from jddp.workbench.trace import Trace, read_trace


def run_explain(arguments: argparse.Namespace) -> int:
    """Prints and draws what `jddp explain` asks for; returns its exit code."""
    check_output("--html", arguments.html)
    trace = None if arguments.trace is None else read_trace(arguments.trace)
    step = None if arguments.target is None else _modelled(arguments)
    text = _as_text(trace, step)
    if arguments.html is not None:
        lanes = [] if trace is None else trace.lanes()
        lanes += [] if step is None else [step.prediction.lanes()]
        write_output("--html", arguments.html, draw_page(text, lanes))
    show(json.dumps(_as_json(trace, step)) if arguments.json else text)
    return ExitCode.DONE


def _modelled(arguments: argparse.Namespace) -> Explanation:
    config, _ = load_config(_configs(arguments), arguments.overrides)
    gpu, topology, links = arguments.target, arguments.topology or "1x8", arguments.link
    job = build(config, needs_data=False, mesh=Target.named(gpu, topology, links).mesh())
    options = {"topology": topology, "links": links, "scaling": arguments.scaling}
    return explain(job.ddp, job.batch_spec, target=gpu, **options)


def _configs(arguments: argparse.Namespace) -> list[str]:
    """The configs that are named, or else the config of the traced run."""
    if arguments.config or arguments.trace is None:
        return list(arguments.config)
    own = arguments.trace / "config.yaml"
    if not own.is_file():
        raise UsageError(f"{own} is not there. Name the config of the traced step by --config.")
    return [str(own)]


def _as_json(trace: Trace | None, step: Explanation | None) -> JsonObject:
    if step is None:
        assert trace is not None  # One of them is there.
        return trace.as_json()
    return step.as_json() | ({} if trace is None else {"measured": trace.as_json()})


def _as_text(trace: Trace | None, step: Explanation | None) -> str:
    parts = [str(x) for x in (trace, step) if x is not None]
    if trace is not None and step is not None:
        parts.insert(1, times_as_text([trace.times, step.prediction.times]))
    return "\n\n".join(parts)
