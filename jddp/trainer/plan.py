"""The settings of a run: its length, and the periods of what it does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jax.typing import ArrayLike

from jddp.distributed.watchdog import Limits
from jddp.errors import ConfigError, check_choice
from jddp.trainer.callbacks import Callback
from jddp.typing import Batches, JsonObject, Settings

POSITIVE = ["num_steps", "log_every_steps", "eval_every_steps", "save_every_steps", "keep"]
POSITIVE += ["keep_every_steps", "check_replicas_every_steps", "max_consecutive_skips"]
# What all processes must have in common. Batches and functions have no text that is the same.
COMMON = sorted((*POSITIVE, "num_epochs", "resume", "eval_params", "seed", "same_batches"))


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
      run_dir: Folder for metrics and checkpoints, or its URL; None keeps nothing.
      config: Settings of the run; a directory with other ones is refused.
      manifest: Further facts, such as versions.
      callbacks: Objects as `jddp.Callback` describes them.
      limits: Seconds that a phase may take before its processes are reported as hanging.

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
    learning_rate: Callable[[int], ArrayLike] | None
    check_replicas_every_steps: int | None
    max_consecutive_skips: int
    seed: int
    same_batches: bool
    run_dir: str | Path | None
    config: Settings | None
    manifest: Settings
    callbacks: Sequence[Callback]
    limits: Limits

    @property
    def settings(self) -> JsonObject:
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
