"""The length of a job and its periods, in steps or in epochs; schedules follow the length.

Epochs end with their last example. A run that ended in a partial batch and is then extended takes
one step more than a run of that length from the start, so its length follows from its checkpoint.
"""

from pathlib import Path

from jddp.checkpoint.folders import finished
from jddp.checkpoint.reader import read_object
from jddp.config.options import Section
from jddp.config.permissions import absolute, is_url
from jddp.config.schema import Config
from jddp.data import count_steps
from jddp.data.periods import Epochs
from jddp.errors import FileSystemError


def period_of(section: Section, prefix: str = "") -> int | Epochs | None:
    """The period that a section has in steps or in epochs; None where it has neither.

    Args:
      section: A section of a config.
      prefix: What is due, such as "eval_".
    """
    epochs = getattr(section, f"{prefix}every_epochs")
    every: int | None = getattr(section, f"{prefix}every_steps")
    return every if epochs is None else Epochs(epochs)


def num_steps_of(config: Config, num_examples: int, folder: Path) -> int:
    """Counts all steps of a job, including steps before a resume.

    Args:
      config: Config of the job.
      num_examples: Number of training examples.
      folder: Folder that relative paths of the config belong to.

    Raises:
      ConfigError: If the number of epochs is not positive.
      DataError: If only full batches count, and there is none.
    """
    train, data = config.train, config.data
    if train.num_epochs is None:
        assert train.num_steps is not None  # as the config requires
        return train.num_steps
    size, drops = data.global_batch_size, data.drop_remainder
    num_steps = count_steps(train.num_epochs, num_examples, size, drops)
    end = max(1, round(train.num_epochs * num_examples))
    for path in (config.run.dir, config.checkpoint.start_from):
        if path is None or is_url(path):
            continue  # A URL is read where the run begins: its schedule may end a step early.
        if found := _newest(absolute(path, folder=folder) / "checkpoints"):
            step, position = found
            left = max(0, end - position)
            return step + (left // size if drops else -(-left // size))
    return num_steps


def _newest(directory: Path) -> tuple[int, int] | None:
    """The step of the newest checkpoint, and the examples that it has taken; None for none."""
    try:
        steps = finished(directory) if directory.is_dir() else []
        if not steps:
            return None
        taken = read_object(directory / str(steps[-1]) / "run.json")["position"]["state"]
        return steps[-1], min(int(taken["position"]), int(taken.get("end", taken["position"])))
    except (FileSystemError, LookupError, TypeError, ValueError, AttributeError):
        return None  # no checkpoint of jddp, or a damaged one, which resuming reports
