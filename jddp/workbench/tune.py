"""`jddp tune [--config FILE]... [key.path=value]...`: with which keys is a step fastest?

Takes a job as `jddp.train` does, and tries sizes and forms of its buckets, and with a GPT what is
computed again and the number of micro-batches: on the devices at hand, alternating with the config
as it is, or modelled for GPUs that need not be there (`--target`). With `--batch` it finds the
largest batch that fits. Nothing is trained, and the data may be absent.
"""

import argparse
import json
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jddp.config import cli
from jddp.distributed.command import run_command
from jddp.ground.errors import ExitCode, file_errors, report, show

if TYPE_CHECKING:
    from jddp.config.schema import Config
    from jddp.workbench.tuning import Scorer


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    description = "Find the keys with which a job's step is fastest, or its largest batch."
    parser = cli.Parser(prog="jddp tune", description=description)
    cli.add_config_arguments(parser)
    add = parser.add_argument
    cli.add_target_arguments(parser)
    add("--minutes", type=float, default=10.0, help="begin no candidate after these (default: 10)")
    add("--out", type=Path, metavar="FILE", help="write the best keys as a config")
    add("--batch", action="store_true", help="find the largest batch that fits, instead")
    add("--json", action="store_true", help="print one line of JSON instead")
    return run_command(lambda: _tune(parser.parse_intermixed_args(argv)))


def _check_writable(path: Path) -> None:
    """Checks that a file can be written, and leaves it as it is."""
    is_new = not path.exists()
    path.open("ab").close()
    if is_new:
        path.unlink()


def _tune(arguments: argparse.Namespace) -> int:
    from jddp.config.files import load_config

    config, _ = load_config(arguments.config, arguments.overrides)
    cli.check_target(arguments)
    if arguments.out is not None:  # Now, before it takes minutes.
        with file_errors(f"--out {arguments.out} cannot be written"):
            _check_writable(arguments.out)
    score, how = _scorer(arguments)
    if arguments.batch:
        return _largest(arguments, config, score, how)
    from jddp.workbench.tuning import AS_IT_IS, Candidate, tune

    def note(candidate: Candidate) -> None:
        step = candidate.refused or f"{1e3 * candidate.seconds:.2f} ms"
        report(f"{str(candidate) or AS_IT_IS}: {step}")

    found = tune(config, score, how, seconds=60 * arguments.minutes, note=note)
    if arguments.out is not None:
        with file_errors(f"--out {arguments.out} cannot be written"):
            arguments.out.write_text(found.fragment, encoding="utf-8")
    show(json.dumps(found.as_json()) if arguments.json else str(found))
    return ExitCode.DONE


def _scorer(arguments: argparse.Namespace) -> "tuple[Scorer, str]":
    """The scorer that was asked for, and its description for people."""
    if arguments.target is not None:
        # If JAX found GPUs here, it would compile for these alone.
        os.environ["JAX_PLATFORMS"] = "cpu"
    from jddp.workbench.tuning import measured, modelled

    if arguments.target is None:
        cli.share_gpus()  # A job may run on the GPUs.
        return measured(), "measured on the devices at hand"
    topology = arguments.topology or "1x8"
    score = modelled(arguments.target, topology, arguments.link)
    return score, f"modelled for {topology} {arguments.target}"


def _largest(arguments: argparse.Namespace, config: "Config", score: "Scorer", how: str) -> int:
    from jddp.trainer.reports.lines import COLUMNS
    from jddp.workbench.tuning import largest_batch

    multiple = config.ddp.accumulate_steps * _num_devices(arguments, config)
    found = largest_batch(config, score, multiple_of=multiple)
    needed, limit = found.score.bytes, found.score.limit
    needs = f"{needed / 1e9:.1f} of {limit / 1e9:.1f} GB of a device, {how}"
    rest = "; the data hold no more" if found.holds_all_data else ""
    text = f"data.global_batch_size={found.size} is the largest that fits, to 3 %: {needs}{rest}"
    values = {"global_batch_size": found.size, "bytes": needed, "limit": limit}
    show(json.dumps(values) if arguments.json else textwrap.fill(text, COLUMNS))
    return ExitCode.DONE


def _num_devices(arguments: argparse.Namespace, config: "Config") -> int:
    if arguments.target is not None:
        from jddp.workbench.described import Target

        topology = arguments.topology or "1x8"
        return Target.named(arguments.target, topology, arguments.link).fabric.num_devices
    import jax

    num = config.mesh.num_devices
    return jax.device_count() if num == "auto" else num
