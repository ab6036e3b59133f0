"""A short trial of a job: a few steps of everything that it does, of which nothing is kept.

    with fast_dev_run(config) as short:
        build(short).run()

The trial is a job of its own, with a config of its own: no other room knows of it.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jddp.config.files import with_overrides
from jddp.config.permissions import expand, is_url
from jddp.config.schema import Config
from jddp.distributed.coordination import from_first, process_index
from jddp.errors import UsageError, file_errors, report

NUM_STEPS, NUM_EVAL_BATCHES = 3, 2
SECONDS = 600.0  # for process 0 to make the folder


@contextlib.contextmanager
def fast_dev_run(config: Config) -> Iterator[Config]:
    """The config of a short trial, in a run directory that is removed when the block ends.

    It takes 3 steps, evaluates 2 batches after the second and the last, and saves at the end. The
    directory is beside `run.dir`, where the run itself would write; for a URL it is in the working
    directory. Sinks get nothing. Every process of a job calls it, when they are connected.

    Raises:
      FileSystemError: If the directory cannot be made.
      UsageError: If the run begins with the steps of another run.
    """
    if config.checkpoint.start_from is not None:
        raise UsageError(
            "--fast-dev-run begins with a first step: leave out checkpoint.start_from, or read its "
            "parameters by model.init_from."
        )
    made = _make_folder(config.run.dir or "") if process_index() == 0 else ""
    folder = from_first("fast-dev-run", made, timeout_seconds=SECONDS)
    try:
        yield shortened(config, folder)
    finally:
        if process_index() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            report("fast dev run: nothing of it was kept")


def _make_folder(run_dir: str) -> str:
    """A new folder beside the run directory, in the nearest folder that exists."""
    path = Path("run") if is_url(run_dir) else expand(run_dir)
    beside = next(folder for folder in path.absolute().parents if folder.is_dir())
    with file_errors(f"{beside} cannot be written"):
        return tempfile.mkdtemp(prefix=".fast-dev-run-", dir=beside)


def shortened(config: Config, folder: str) -> Config:
    """The config of the trial in a folder."""
    return with_overrides(
        config,
        {
            "run.dir": folder,
            "train.num_steps": NUM_STEPS,
            "train.num_epochs": None,
            "train.log_every_steps": 1,
            "train.log_every_epochs": None,
            "train.eval_every_steps": 2,
            "train.eval_every_epochs": None,
            "train.limit_eval_batches": NUM_EVAL_BATCHES,
            "checkpoint.every_steps": None,
            "checkpoint.every_epochs": None,
            "checkpoint.resume": "auto",
            "report.sinks": [],  # which may keep records elsewhere
        },
    )
