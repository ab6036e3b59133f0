"""`jddp train --sweep key=value,value ...`: trains each point of a sweep, and compares the runs."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jddp.config.files import load_config
from jddp.config.permissions import expand
from jddp.distributed.schedulers import resolve_identity
from jddp.errors import Error, ExitCode, UsageError, report, show
from jddp.names import few
from jddp.workbench.comparison import compare_runs
from jddp.workbench.results import is_run, read_runs
from jddp.workbench.sweep import Sweep
from jddp.workbench.sweep_folder import STOPPED, SweepFolder

MOST = 100  # runs that are begun without a question


def run_sweep(arguments: argparse.Namespace) -> int:
    """Trains what `jddp train --sweep` asks for; returns the exit code of the first failure.

    Raises:
      ConfigError: If a key or a value is wrong, before the first run.
      UsageError: If this is one of several processes, or nobody agrees to very many runs.
    """
    if arguments.find_rate:
        raise UsageError("--sweep and --find-rate exclude each other. Find the rate first.")
    if arguments.fast_dev_run:
        raise UsageError("--sweep and --fast-dev-run exclude each other. Try one point out first.")
    _refuse_job()
    sweep = Sweep.parse(arguments.sweep)
    files, overrides = arguments.config, arguments.overrides
    samples = (load_config(files, [*overrides, *x.overrides])[0] for x in sweep.samples())
    folder = SweepFolder(expand(next(samples).run.dir or ""), files, overrides)
    if is_run(folder.path):
        raise UsageError(
            f"run.dir {folder.path} holds a run. Give the runs of a sweep a folder of their own, "
            f"such as run.dir={folder.path}-sweep."
        )
    if arguments.dry_run:
        for point in sweep.points():
            show(shlex.join(["jddp", "train", *folder.arguments(point)]))
        return ExitCode.DONE
    if not arguments.yes:
        _ask(sweep.num_points, folder.path)
    for _ in samples:
        pass  # Each has been checked.
    codes = folder.train(sweep)
    _compare([folder.path / point.name for point in sweep.points()])
    return _conclude(codes, sweep.num_points)


def _refuse_job() -> None:
    """Refuses to start the runs in each of several processes."""
    num = resolve_identity().num_processes
    if num > 1:
        raise UsageError(
            f"--sweep starts each run itself, and this is one of {num} processes. --sweep ... "
            "--dry-run lists the commands: launch one after the other, then jddp compare RUN.DIR."
        )


def _ask(num_runs: int, folder: Path) -> None:
    if num_runs <= MOST:
        return
    about = f"--sweep: {num_runs:,} runs, one after the other, in {folder}"
    if not sys.stdin.isatty():
        raise UsageError(f"{about}. Add --yes to train them.")
    if input(f"jddp: {about}. Train them? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UsageError(f"{about}: nothing was trained.")


def _compare(runs: Sequence[Path]) -> None:
    try:
        show(f"\n{compare_runs(read_runs([*filter(is_run, runs)]))}")
    except Error as error:  # such as runs that have failed before an evaluation
        report(error.in_shell)


def _conclude(codes: dict[str, int], num_runs: int) -> int:
    failed = {name: code for name, code in codes.items() if code != ExitCode.DONE}
    if not failed:
        return ExitCode.DONE
    last, code = [*failed.items()][-1]
    if code in STOPPED:
        report(f"stopped at {last}. The same command resumes.")
        return code
    names = few([f"{name} (exit code {code})" for name, code in failed.items()])
    report(
        f"{len(failed)} of {num_runs:,} runs failed: {names}. The same command tries them again."
    )
    return next(iter(failed.values()))
