"""The command line of training, in a process that handles signals already.

Arguments and config are checked before JAX is imported, so that a mistyped key is reported at once.
A mistake of yours is one line on standard error and an exit code; any other exception keeps its
traceback. If one of several processes fails, it exits at once: JAX would hold all of them in a
shutdown barrier for minutes.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path

from jddp.commands.checks import explain_job
from jddp.config import cli
from jddp.config.files import dump_values, load_config
from jddp.config.keys import describe_keys
from jddp.config.schema import Config
from jddp.distributed.command import lasting_streams, leave_job, tell
from jddp.distributed.exits import process
from jddp.distributed.failure_file import RESULT, describe_failure, write_failure
from jddp.distributed.gpus import add_flag
from jddp.distributed.identity import resolve_identity
from jddp.distributed.signals import leaves_at_once, stop_signals
from jddp.distributed.worker import fork_spare
from jddp.ground.errors import Error, ExitCode, UsageError, report, show
from jddp.ground.files import private_cache
from jddp.ground.names import tool

EXAMPLE = "e.g. jddp train --config gpt_stdlib optimizer.learning_rate=3e-4 --dry-run"


@lasting_streams()
def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    try:
        code = process.exit_code = _start(_parse(argv))
        return code
    except (Exception, KeyboardInterrupt) as error:
        process.is_early = False  # A signal must not replace the exit code.
        return _leave(error)


def _start(arguments: argparse.Namespace) -> int:
    if arguments.help_keys:
        print(describe_keys(Config))
        return ExitCode.DONE
    if arguments.sweep:
        return int(tool("sweep")(arguments))
    cli.check_target(arguments)
    if arguments.target:
        if not arguments.dry_run:
            raise UsageError("--target needs --dry-run: a job trains on the devices at hand.")
        return explain_job(arguments)
    config, name = load_config(arguments.config, arguments.overrides)
    if arguments.print_config:
        print(dump_values(config.model_dump()), end="")
        return ExitCode.DONE
    add_flag(os.environ)
    if arguments.dry_run:
        cli.share_gpus()  # A job may be running there.
    else:
        if not arguments.find_rate:  # It leaves no run.
            from jddp.trainer.reports.run_directory import RunDirectory

            RunDirectory(config.run.dir or "", is_writer=True).check_usable()
        _turn_on_cache()
        importlib.import_module("jddp.commands.summary")  # Imports all that a job needs.
        gc.freeze()  # Collections while steps are traced take a tenth of the time of a start.
        if fork_spare():
            importlib.import_module("numpy").random.seed()  # Others would draw the same numbers.
            with leaves_at_once():  # The handlers of signals stayed with another process.
                return _begin(arguments, config, name)
    return _begin(arguments, config, name)


def _begin(arguments: argparse.Namespace, config: Config, name: str) -> int:
    """Joins the job and trains; a worker that a spare has forked begins here."""
    from jddp.distributed.failure import owned_process
    from jddp.distributed.join import initialize

    identity = resolve_identity()
    initialize(identity)
    detected = str(identity) if identity.source else ""
    with owned_process():
        if arguments.find_rate:
            rates = tool("find-rate")(config)
            if identity.process_id == 0:
                show(f"\n{rates}")
            return ExitCode.DONE
        return _train(config, name, detected, is_dry_run=arguments.dry_run)


def _train(config: Config, name: str, detected: str, *, is_dry_run: bool) -> int:
    from jddp.commands.summary import closing, opening, preview
    from jddp.trainer.job.build import build
    from jddp.trainer.reports.files import as_json
    from jddp.trainer.reports.lines import columns_of

    job = build(config, needs_data=not is_dry_run)
    columns = columns_of(sys.stdout)
    text = opening(job, name, detected, columns=columns)  # All processes take part.
    if job.is_writer:
        show(text)
    if is_dry_run:
        job.first_state()  # Refuses initial weights that do not exist.
        text = preview(job)
        if job.is_writer:
            show(f"\n{text}\n\ndry run: nothing was trained or written")
        return ExitCode.DONE
    run = job.run()
    if path := os.environ.get(RESULT):  # The launcher asks for the result.
        facts = {"step": run.step, "run_dir": str(config.run.dir), **run.eval_metrics}
        Path(path).write_text(json.dumps(as_json(facts), default=str))
    if run.interrupted is not None:
        # Schedulers repeat a signal, and end the other processes when one has exited; all are to
        # exit with this code.
        for number in set(stop_signals()) - {signal.SIGINT}:
            signal.signal(number, signal.SIG_IGN)
        return ExitCode.PREEMPTED
    if job.is_writer:
        show(closing(job, run, columns=columns))
    return ExitCode.DONE


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    sections = textwrap.fill(f"sections: {' '.join(Config.model_fields)}", 78)
    parser = cli.Parser(
        prog="jddp train",
        usage="%(prog)s [--config FILE]... [key.path=value]... [--dry-run]",
        description="Train a Flax model, as configured. The same command again resumes.",
        epilog=f"{sections}\n\n{EXAMPLE}",
    )
    cli.add_config_arguments(parser)
    add = parser.add_argument
    either = parser.add_mutually_exclusive_group().add_argument
    either("--dry-run", action="store_true", help="compile, print the memory, train nothing")
    either("--find-rate", action="store_true", help="try rising learning rates, and suggest one")
    cli.add_target_arguments(parser)
    parser.set_defaults(json=False, scaling=False, trace=None)  # The report is for people.
    add("--print-config", action="store_true", help="print the resolved config")
    add("--sweep", nargs="+", metavar="key.path=a,b", help="train and compare all combinations")
    add("--help-keys", action="store_true", help="print every key, its default and its meaning")
    return parser.parse_intermixed_args(argv)


def _turn_on_cache() -> None:
    """Turns on the persistent compilation cache of JAX, which is not imported yet."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        try:
            cache = private_cache("xla", "the cache of compiled programs")
            os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        except Error as error:  # Without the cache the start is only slower.
            report(f"{error} Until then the cache is off.")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _leave(error: BaseException) -> int:
    """Reports an error. A process of a job ends at once, and its job too; a single one returns.

    Returns:
      The exit code.
    """
    code: int = ExitCode.BUG
    if isinstance(error, KeyboardInterrupt):
        code = ExitCode.INTERRUPTED
        tell("interrupted. The same command resumes from the last checkpoint.")
    elif isinstance(error, Error):
        code = error.exit_code
        tell(error.in_shell)
    else:
        traceback.print_exception(error)
    leave_job(code, error)
    with contextlib.suppress(Error):  # The process may not know its number.
        write_failure(describe_failure(resolve_identity().process_id, code, error))
    return code
