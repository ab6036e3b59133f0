"""A judgement on a run: what a rule of the verdict returns."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Judgement:
    """What a rule has found.

    Attributes:
      sentence: The judgement, in one line.
      evidence: The numbers behind it.
      next_step: What to do.
      is_good: Whether nothing is wrong.
    """

    sentence: str
    evidence: str
    next_step: str
    is_good: bool = False
