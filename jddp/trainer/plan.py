"""The settings of a run: its length, and the periods of what it does."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from jddp.errors import ConfigError, check_choice
from jddp.typing import Batches

POSITIVE = ["num_steps", "log_every_steps", "eval_every_steps", "save_every_steps", "keep"]
POSITIVE += ["keep_every_steps", "check_replicas_every_steps", "max_consecutive_skips"]


@dataclass
class Plan:
    """The settings of a run; periods are in optimizer steps, and None means once, at the end.

    Attributes:
      num_steps: Total number of optimizer steps, including steps before a resume. With a number of
        epochs it is counted again when the run resumes: epochs end with their last example.
      num_epochs: Number of passes over the data, or None.
      log_every_steps: Steps between train records.
      eval_every_steps: Steps between evaluations.
      save_every_steps: Steps between checkpoints.
      keep: Number of newest checkpoints to keep.
      keep_every_steps: Steps between checkpoints that are kept for good, or None.
      resume: "auto", "never", "must" or "changed".
      evaluation: Evaluation batches, iterated again each time, or None.
      eval_params: "params" or "ema".
      learning_rate: Learning rate as a function of the step, for the records, or None.
      check_replicas_every_steps: Steps between comparisons of all replicas.
      max_consecutive_skips: Number of skipped steps in a row that ends the run.
      seed: Seed of the first state.
      same_batches: Whether processes may have the same rows.

    Raises:
      ConfigError: If a number is not positive, or a choice is unknown.
    """

    num_steps: int
    num_epochs: float | None
    log_every_steps: int
    eval_every_steps: int | None
    save_every_steps: int | None
    keep: int
    keep_every_steps: int | None
    resume: str
    evaluation: Batches | None
    eval_params: str
    learning_rate: Callable[[int], Any] | None
    check_replicas_every_steps: int | None
    max_consecutive_skips: int
    seed: int
    same_batches: bool

    @property
    def arguments(self) -> dict[str, Any]:
        """The settings that must be equal on all processes, by the names of `fit`'s arguments.

        Batches and functions are left out: they have no text that is the same everywhere.
        """
        names = {field.name for field in fields(self)} - {"evaluation", "learning_rate"}
        return {name: getattr(self, name) for name in sorted(names)}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that may differ when a run resumes, and `eval_params`, by name."""
        return {name: getattr(self, name) for name in (*POSITIVE, "eval_params")}

    def __post_init__(self) -> None:
        """Refuses wrong settings, before anything is compiled or written."""
        for name in POSITIVE:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise ConfigError(f"{name} is a whole number; got {value!r}.")
            if value < 1:
                raise ConfigError(f"{name} is at least 1; got {value}.")
        check_choice("resume", self.resume, ("auto", "never", "must", "changed"))
        check_choice("eval_params", self.eval_params, ("params", "ema"))
