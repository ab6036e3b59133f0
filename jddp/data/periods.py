"""Periods of a run, in steps or in epochs: when it evaluates, saves and records.

    every = Epochs(0.5)
    every.ended(before, now)  # numbers of the half epochs that ended in between

An epoch ends with its last example, which may be inside a batch. So a period in epochs ends with
the first step that has taken all its examples, whatever the batch sizes of the run have been.
"""

from dataclasses import dataclass
from typing import NamedTuple

from jddp.ground.errors import ConfigError


class Reached(NamedTuple):
    """How far a run has come.

    Attributes:
      step: Number of finished steps.
      examples: Number of examples that they have taken.
      num_examples: Number of examples of an epoch; 0 if the batches know no epochs.
    """

    step: int
    examples: int = 0
    num_examples: int = 0

    @property
    def fields(self) -> dict[str, float]:
        """The step, and if epochs are known their number, a fraction: fields of a record."""
        epoch = {"epoch": self.examples / self.num_examples} if self.num_examples else {}
        return {"step": self.step, **epoch}


@dataclass(frozen=True)
class OptimizerSteps:
    """A period of some steps.

    Attributes:
      number: Number of steps.
    """

    number: int

    def __str__(self) -> str:
        return "step" if self.number == 1 else f"{self.number:,} steps"

    def ended(self, before: Reached, now: Reached) -> range:
        """The numbers, from 1, of the periods that ended in between."""
        return range(before.step // self.number + 1, now.step // self.number + 1)


@dataclass(frozen=True)
class Epochs:
    """A period of some epochs, or of a part of one: `eval_every_steps=jddp.data.Epochs(1)`.

    A part of an epoch ends with the nearest example, as `num_epochs` does.

    Attributes:
      number: Number of epochs.

    Raises:
      ConfigError: If it is not positive and finite.
    """

    number: float

    def __post_init__(self) -> None:
        if not 0 < self.number < float("inf"):
            raise ConfigError(f"Epochs({self.number!r}) is no positive number, such as 1 or 0.5.")

    def __str__(self) -> str:
        return "epoch" if self.number == 1 else f"{self.number:g} epochs"

    def ended(self, before: Reached, now: Reached) -> range:
        """The numbers, from 1, of the periods that ended in between."""
        return range(self._num_ended(before) + 1, self._num_ended(now) + 1)

    def _num_ended(self, reached: Reached) -> int:
        if not reached.num_examples:
            return 0
        return int((reached.examples + 0.5) / (self.number * reached.num_examples))


Period = OptimizerSteps | Epochs
