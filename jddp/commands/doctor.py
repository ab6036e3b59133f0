"""`python -m jddp.doctor`: preflight check of a machine or of a job.

Start it the way you start the job, under the same launcher: every process examines its host and
devices, and all together examine clocks, the shared directory and the network. Each finding comes
with its fix. The exit code is 0, or 69 if a finding will stop a job.

`python -m jddp.doctor RUN_DIR` prints the first failure of a run, and examines nothing.
`python -m jddp.doctor --config my.yaml` compares the rate of a job's data with that of its steps.
`python -m jddp.doctor --gpu-acceptance` tries jddp on the GPUs, and writes a page.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jddp.config.cli import Parser, run_command, share_gpus
from jddp.config.permissions import expand
from jddp.distributed.failure_file import VARIABLE, headline, read_failure
from jddp.doctor.finding import BAD, OK, WARN, Finding
from jddp.errors import Error, ExitCode, FileSystemError, UsageError, show

ACCEPTANCE = Path(__file__).parents[2] / "benchmarks" / "gpu_acceptance.py"  # of a checkout


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    return run_command(lambda: _run(_parser().parse_args(argv)))


def _parser() -> Parser:
    about = "Check for causes of failed jobs, and print their fixes."
    parser = Parser(prog="python -m jddp.doctor", description=about)
    add = parser.add_argument
    add("run", type=expand, nargs="?", help="only print the first failures of this run directory")
    shared = "a directory that all processes share (runs)"
    add("--dir", type=expand, default=Path("runs"), help=shared)
    add("--num-devices", type=int, default=8, help="virtual CPU devices if there is no GPU (8)")
    about = "only compare the rate at which the data of a job come with its steps"
    add("--config", action="append", metavar="FILE", help=about)
    page = Path("gpu_acceptance.md")
    about = "test and measure the GPUs in minutes; write a page"
    add("--gpu-acceptance", nargs="?", const=page, type=expand, metavar="PAGE", help=about)
    trial = "cpu tries --gpu-acceptance on virtual devices (gpu)"
    add("--platform", choices=["gpu", "cpu"], default="gpu", help=trial)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    if arguments.gpu_acceptance is not None:
        return _accept(arguments)
    if arguments.config:
        return _compare_rates(arguments.config)
    return _examine(arguments) if arguments.run is None else _print_failures(arguments.run)


def _accept(arguments: argparse.Namespace) -> int:
    if not ACCEPTANCE.exists():
        raise UsageError(
            "--gpu-acceptance is a part of the repository, and not of the installed package. "
            "Clone the repository, and run it from there: python -m jddp.doctor --gpu-acceptance."
        )
    command = [sys.executable, ACCEPTANCE, arguments.gpu_acceptance]
    command += ["--platform", arguments.platform, "--num-devices", str(arguments.num_devices)]
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}).returncode


def _compare_rates(files: Sequence[str]) -> int:
    """Prints whether the data of a job keep up with its steps."""
    from jddp.config.files import load_config
    from jddp.job.data_rate import measure_data_rate
    from jddp.job.job import build

    config, _ = load_config(files)
    share_gpus()  # with a job that may run there
    job = build(config)
    rate = measure_data_rate(job)
    if job.is_writer:
        show(str(Finding(WARN if rate.num_workers > config.data.num_workers else OK, str(rate))))
    return ExitCode.DONE


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


def _examine(arguments: argparse.Namespace) -> int:
    import jax

    from jddp.distributed.agree import agree, refuse_gpus
    from jddp.distributed.coordination import gather, process_index
    from jddp.distributed.gpus import gpu_facts
    from jddp.distributed.join import configure_devices, initialize, require_devices
    from jddp.distributed.schedulers import resolve_identity
    from jddp.doctor.agreement import check_directory, check_job
    from jddp.doctor.busy import check_busy
    from jddp.doctor.devices import check_devices
    from jddp.doctor.host import check_host
    from jddp.doctor.links import check_links, measure_all_reduce
    from jddp.engine.mesh import make_mesh

    share_gpus()  # with a job that may run there
    findings = [*check_host(), *check_busy()]
    identity = resolve_identity()
    per_process = max(1, arguments.num_devices // identity.num_processes)
    configure_devices(per_process * identity.num_processes, num_processes=identity.num_processes)
    try:
        initialize(identity)
        agree("devices", gpu_facts(os.environ))  # before they start: they would wait
        refuse_gpus(identity)
        missing = require_devices()
    except Error:
        show("\n".join(map(str, findings)))  # one of which may be the reason
        raise
    findings += [*check_devices(missing), check_directory(arguments.dir)]
    mine = json.dumps(list(map(str, findings)))
    of_processes = gather("doctor", mine, timeout_seconds=120)
    shared = check_job(arguments.dir)
    mesh = make_mesh(jax.devices())  # of different kinds, too
    table, right = measure_all_reduce(mesh)
    shared += [*right, *check_links(mesh)]
    if process_index() == 0:
        _print(of_processes, shared, table)
    levels = {finding.level for finding in (*findings, *shared)}
    return ExitCode.UNAVAILABLE if BAD in levels else ExitCode.DONE


def _print(of_processes: list[str], shared: list[Finding], table: Sequence[object]) -> None:
    found: list[list[str]] = list(map(json.loads, of_processes))
    for process, findings in enumerate(found):
        if process and _comparable(findings) == _comparable(found[0]):
            print(f"process {process}: same as process 0")
        else:
            show("\n".join([f"process {process}", *findings]))
    show("\n".join(["together", *map(str, shared)]))
    print("\nall-reduce", f"{'size':>10} {'time':>13} {'bandwidth':>14}", *table, sep="\n")


def _comparable(findings: list[str]) -> list[str]:
    """The words of findings without the good name of a host and without free space."""
    words = (" ".join(each.split()) for each in findings)
    own = (each for each in words if not (each.startswith(OK) and " resolves to " in each))
    return [re.sub(r"[\d.,]+ GiB free", "GiB free", each) for each in own]
