"""`jddp report RUN`: writes a page on a run, and prints its verdict.

Files of its directory are read, and nothing is run; the run may be running.
"""

from collections.abc import Sequence
from pathlib import Path

from jddp.config.cli import Parser
from jddp.distributed.command import run_command
from jddp.ground.errors import UsageError, file_errors, show
from jddp.ground.files import expand, replace_file

# A run directory has at least one of these.
FILES = ("metrics.jsonl", "config.yaml", "manifest.json", "logs", "checkpoints")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    description = "Write report.html: a verdict on a run, its curves, its times and its config."
    parser = Parser(prog="jddp report", description=description)
    add = parser.add_argument
    add("run_dir", metavar="RUN", help="a run directory, or its URL; the run may be running")
    add("--out", type=expand, metavar="FILE", help="the page (default: report.html in RUN)")
    return run_command(lambda: _report(**vars(parser.parse_args(argv))))


def _report(*, run_dir: str, out: Path | None) -> None:
    from jddp.checkpoint.storage import local_copy
    from jddp.workbench.facts import read_facts
    from jddp.workbench.run_page import NAME, draw_run
    from jddp.workbench.verdict import judge

    if out is None and "://" in run_dir:
        raise UsageError(f"{run_dir} is a URL: give --out FILE for the page.")
    folder = local_copy(run_dir)
    if not any((folder / name).exists() for name in FILES):
        raise UsageError(f"{run_dir} is no run directory: it has none of {', '.join(FILES)}.")
    facts = read_facts(folder, name=run_dir)
    path = out or folder / NAME
    with file_errors(f"{path}: cannot be written"):
        replace_file(path, draw_run(facts).encode(errors="replace"))
    verdict, *others = judge(facts)
    show(f"{verdict.sentence}\n  {verdict.evidence}\n  next: {verdict.next_step}")
    for judgement in others:
        show(f"also: {judgement.sentence}")
    show(f"page: {path}")
