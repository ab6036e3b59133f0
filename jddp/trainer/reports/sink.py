"""A sink: an object that takes the records of a run, such as the metrics file or TensorBoard."""

from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from jddp.typing import Record, Settings


@runtime_checkable
class Sink(Protocol):
    """Takes the records of a run, on process 0."""

    def log(self, record: Record) -> None:
        """Takes a record.

        Args:
          record: Values by name: numbers, and lists (of lists) of numbers for metrics that are
            arrays; from `run.log` also text, and numpy arrays of float32, or of uint8 for images.
            "step" is the number of finished steps. "split" is "train" for the last step before the
            record, "eval" for an evaluation, "layers" for norms of each layer, or "callback".
        """

    def close(self) -> None:
        """Writes what is left; called once, after the last record, also if training has failed."""


class Start(NamedTuple):
    """A start of a run, the argument with which a sink is made.

    Attributes:
      run_dir: Run directory, or None.
      config: Config of the run, or the settings of `fit(config=...)`; {} if there are none.
      step: Number of finished steps; 0 unless the run resumes.
    """

    run_dir: Path | None
    config: Settings
    step: int
