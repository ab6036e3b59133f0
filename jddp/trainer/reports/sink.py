"""A sink: an object that takes the records of a run, such as the metrics file or TensorBoard."""

from typing import Protocol, runtime_checkable

from jddp.typing import Record


@runtime_checkable
class Sink(Protocol):
    """Takes the records of a run, on process 0."""

    def log(self, record: Record) -> None:
        """Takes a record.

        Args:
          record: Values by name: numbers, and lists (of lists) of numbers for metrics that are
            arrays. "step" is the number of finished steps. "split" is "train" for the last step
            before the record, or "eval" for an evaluation.
        """

    def close(self) -> None:
        """Writes what is left; called once, after the last record, also if training has failed."""
